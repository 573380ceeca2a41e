"""A trace on the CPU: what eager kernels would move on a GPU, and how long it may take."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.nn.op_counter import PRODUCTS, OperationCounter
from paceline.planner import eager_kernels as eager
from paceline.planner.eager_kernels import LiveBytes, count_steps, estimate_traffic, find_peak_growth, simulate_cuda
from paceline.planner.tracing import MAX_SECONDS, OpBudget, OverBudget

FUSED = F.scaled_dot_product_attention


class Noted(OperationCounter):
    def __init__(self, more=1.0, last=False):
        super().__init__()
        self.more, self.last, self.noted, self.alive = more, last, {}, LiveBytes()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.alive.track(out)
        return out

    def count(self, name, args, out):
        self.noted.setdefault(name, []).append(estimate_traffic(name, args, out, self.more, self.last))


def noted(work, *sides, more=1.0, last=False, dtype=torch.float32, precision="fp32"):
    with FakeTensorMode(), Noted(more, last) as counter, simulate_cuda(precision):
        found = work(*(torch.empty(side, dtype=dtype, requires_grad=dtype.is_floating_point) for side in sides))
    return counter, found


@pytest.mark.parametrize(
    ("work", "sides", "name", "passes"),
    [
        (lambda x, y: x + y, [(8, 32), (8, 32)], "add", 3),
        (lambda x: x.t().contiguous(), [(8, 32)], "clone", 2 * eager.STRIDED_PASSES),
        (lambda x: x.sum(0), [(1024, 32)], "sum", 1 + 1 / 1024 + eager.SUMMED_BYTES / (4 * 32)),
        (lambda x: x.sum(1), [(32, 1024)], "sum", 1 + 1 / 1024),
        (lambda x: F.relu(x), [(8, 32)], "relu", 2),
    ],
)
def test_an_operation_moves_what_it_reads_and_writes(work, sides, name, passes):
    counter, _ = noted(work, *sides)
    (found,) = counter.noted[name]
    elements = torch.Size(sides[0]).numel()
    assert found.bytes == pytest.approx(4 * elements * passes)


def test_images_are_turned_for_a_product_and_channels_by_themselves_are_slow():
    pair = 2 * 4 * 2 * 16 * 8 * 8
    gathered = eager.CONVOLUTION_PASSES + eager.GATHERED_PASSES * 9 / 2
    for groups, last, passes in (
        (1, False, gathered + eager.TRANSPOSE_PASSES),
        (16, False, eager.DEPTHWISE_PASSES),
        (16, True, gathered),
    ):
        sides = (2, 16, 8, 8), (16, 16 // groups, 3, 3)
        counter, _ = noted(lambda x, w, n=groups: F.conv2d(x, w, padding=1, groups=n), *sides, last=last)
        assert counter.noted["convolution"][0].bytes == pytest.approx(passes * pair)


def test_the_backward_pass_of_a_convolution_makes_what_is_asked_for():
    def both(x, w):
        torch.autograd.grad(F.conv2d(x, w, padding=1).sum(), [x, w])

    def one(x, w):
        torch.autograd.grad(F.conv2d(x.detach(), w, padding=1).sum(), [w])

    twice, once = (noted(f, (2, 16, 8, 8), (16, 16, 3, 3))[0].noted["convolution_backward"][0] for f in (both, one))
    assert twice.bytes == 2 * once.bytes
    assert twice.kernels == 2 * once.kernels


def test_batch_norms_of_images_are_slower_the_fewer_their_channels():
    def normed(x):
        return F.batch_norm(x, None, None, training=True)

    found = [noted(normed, side)[0].noted for side in ((4, 100, 6, 6), (4, 500, 6, 6), (4, 8))]
    few, many, rows = (next(m[0].bytes for name, m in n.items() if "batch_norm" in name) for n in found)
    once = 2 * 4 * 4 * 36  # in and out, of a channel
    assert 10 * 100 * once < few < 11 * 100 * once
    assert eager.BATCH_NORM_PASSES * 500 * once < many < 1.1 * eager.BATCH_NORM_PASSES * 500 * once
    assert rows < eager.PASSES["norm"] * 3 * 4 * 4 * 8
    x = torch.ones(4, 100, 6, 6)
    for grouped, passes in ((False, eager.BATCH_NORM_LAST), (True, eager.BATCH_NORM_GROUPED)):
        found = estimate_traffic("native_batch_norm", (x,), x, last=True, grouped=grouped)
        assert found.bytes == pytest.approx(passes * 2 * x.nbytes), "channels are innermost"


def test_a_convolution_adds_its_bias_by_itself_and_turns_sequences():
    image, weight, bias = (2, 16, 8, 8), (16, 16, 3, 3), (16,)
    once = 4 * 2 * 16 * 8 * 8
    counter, _ = noted(lambda x, w, b: F.conv2d(x, w, b, padding=1), image, weight, bias, last=True)
    gathered = 2 * eager.CONVOLUTION_PASSES + 9 * eager.GATHERED_PASSES
    assert counter.noted["convolution"][0].bytes == pytest.approx((gathered + 2 * eager.CONVOLUTION_BIAS_PASSES) * once)
    how = None, [1], [1], [1], False, [0], 1
    given = (torch.ones(2, 16, 12), torch.ones(16, 16, 3), *how), torch.ones(2, 16, 12)
    passes = 2 * eager.CONVOLUTION_PASSES + 3 * eager.GATHERED_PASSES + 2 * eager.TRANSPOSE_PASSES
    assert eager.count_gathered("convolution", *given) == pytest.approx(eager.COMPILED_SHARE * passes * 2 * 16 * 12)
    given = (torch.ones(image), torch.ones(weight), *how), torch.ones(image)
    assert eager.count_gathered("convolution", *given) == pytest.approx(eager.COMPILED_SHARE * gathered * once / 4)


def test_scores_are_stored_where_some_are_dropped():
    layer = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)
    x, saved = torch.ones(2, 64, 32), []
    with simulate_cuda("bf16"), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = layer(x, x, x, need_weights=False)[0]
    scores = [t for t in saved if t.shape[-2:] == (64, 64)]
    assert {t.dtype for t in scores} >= {torch.float32, torch.bool, torch.bfloat16}
    assert out.shape == x.shape
    assert F.scaled_dot_product_attention is FUSED


@pytest.mark.parametrize(("kind", "gates", "sides"), [("LSTM", 4, 1), ("GRU", 3, 2), ("RNN", 1, 1)])
def test_a_recurrent_layer_multiplies_by_its_state_word_by_word(kind, gates, sides):
    net = getattr(torch.nn, kind)(6, 8, num_layers=2, batch_first=True, bidirectional=sides == 2)
    steps = []

    class Watching(OperationCounter):
        def count(self, name, args, out):
            if name in PRODUCTS:
                steps.append((count_steps(), out.shape[-1]))

    with Watching(), simulate_cuda("fp32"):
        out, state = net(torch.zeros(3, 5, 6))
    assert out.shape == (3, 5, 8 * sides)
    assert steps == [(1, 8 * gates), (5, 8 * gates)] * 2 * sides
    assert len(state) == (2 if kind == "LSTM" else 2 * sides)


@pytest.mark.parametrize(("more", "kernels"), [(1.0, 2), (1000.0, eager.SORT_KERNELS)])
def test_rows_of_a_table_are_sorted_where_a_pass_looks_up_many(more, kernels):
    def looked_up(table):
        torch.autograd.grad(F.embedding(torch.zeros(8, dtype=torch.long), table).sum(), [table])

    counter, _ = noted(looked_up, (50, 4), more=more)
    assert counter.noted["embedding_dense_backward"][0].kernels == kernels


def test_types_are_those_of_a_device():
    def layer(x, w, scale):
        y = F.linear(x, w)
        return y, F.layer_norm(y, (32,)), F.rms_norm(y, (32,), scale.to(y.dtype)), F.softmax(y, -1)

    counter, (product, normed, root_normed, scores) = noted(layer, (4, 32), (32, 32), (32,), precision="bf16")
    assert product.dtype == root_normed.dtype == torch.bfloat16
    assert normed.dtype == scores.dtype == torch.float32
    assert len(counter.noted["native_layer_norm"]) == 2  # the other norm is one kernel too


def test_what_is_kept_is_drawn_by_itself():
    counter, _ = noted(lambda x: F.dropout(x, 0.1, training=True), (4, 32))
    assert list(counter.noted) == ["ones_like", "native_dropout_backward"]
    for p, stored in ((0.1, True), (0.0, False)):
        counter, _ = noted(lambda x, p=p: F.scaled_dot_product_attention(x, x, x, None, p), (2, 2, 16, 8))
        assert any("softmax" in name for name in counter.noted) is stored


def test_what_is_alive_when_most_is_grows_with_the_samples():
    def chain(x):
        y = x.exp()
        z = y + y
        del y
        return z + z

    few, many = (noted(chain, (samples, 10))[0].alive for samples in (4, 8))
    assert find_peak_growth(few, many, 4) == 4 * 4 * 10  # y is needed to go back
    assert find_peak_growth(few, LiveBytes(), 4) == 0


def large(*sides):
    """As large as it says, and no memory."""
    return torch.zeros(1).expand(*sides)


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.ones(1 << 20, 1 << 20),
        lambda: torch.empty(1 << 30).normal_(),
        lambda: large(1 << 15, 1 << 15) @ large(1 << 15, 1 << 15),
        lambda: large(1 << 20, 1) * large(1 << 20),
        lambda: F.conv2d(large(8, 64, 1024, 1024), large(64, 64, 3, 3)),
        lambda: F.scaled_dot_product_attention(*[large(8, 16, 1 << 15, 128)] * 3),
        lambda: nn.init.orthogonal_(torch.empty(4096, 4096)),
        lambda: nn.LSTM(2048, 2048)(large(512, 64, 2048)),
    ],
)
def test_what_would_take_long_is_not_begun(work):
    with pytest.raises(OverBudget), OpBudget():
        work()


def test_what_takes_a_moment_is_computed():
    layer = nn.Conv2d(3, 8, 3)
    with OpBudget() as budget:
        out = layer(torch.ones(2, 3, 8, 8)).sum()
        out.backward()
    assert 0 < budget.spent_s < MAX_SECONDS
    assert layer.weight.grad.abs().sum() > 0


def test_torch_does_not_import_its_compiler_for_it():
    """That takes as long as all else that a plan does."""
    code = (
        "import sys, torch; from paceline.planner.tracing import OpBudget\n"
        "with OpBudget(): torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_groups_of_a_convolution_fill_a_part_of_what_a_kernel_multiplies():
    def rate(groups):
        x, weight = torch.empty(2, 128, 8, 8, device="meta"), torch.empty(128, 128 // groups, 3, 3, device="meta")
        out = torch.empty(2, 128, 8, 8, device="meta")
        given = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        return eager.estimate_kernel_efficiency("convolution", given, out)

    assert [rate(groups) / rate(1) for groups in (2, 4, 32)] == pytest.approx([1, 32 / 64, 4 / 64])
