"""Layers of one structure are found and compiled; what cannot be compiled runs as written, and is named."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import Workload, train
from paceline.config import build_spec
from paceline.parallel import compile as compile_module
from paceline.parallel.channels_last import prefers_channels_last, use_channels_last
from paceline.parallel.compile import Compilation, compile_layers, find_equal_layers, share_compiled
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from results import steps_of


class Block(nn.Module):
    def __init__(self, width=8, asks=False):
        super().__init__()
        self.up, self.down, self.asks = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), asks

    def forward(self, x):
        if self.asks and x.sum().item() > 1e9:
            raise ValueError
        return x + self.down(torch.relu(self.up(x)))


class Convolutions(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm, nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


def encoder(layers):
    each = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(each, layers, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("model", "layers", "share"),
    [
        (encoder(3), 3, 1 / 3),
        (nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2)), 2, 1 / 2),
        (nn.ModuleDict({"encoder": encoder(2), "rest": nn.ModuleList([Block(), Block(), Block(16)])}), 5, 3 / 5),
        (nn.Sequential(Block(8), Block(16), Block(32)), 0, 1),
        (nn.Sequential(*[Convolutions(nn.BatchNorm2d(4)) for _ in range(3)]), 0, 1),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), 0, 1),
    ],
)
def test_layers_of_one_structure_are_found(model, layers, share):
    found = find_equal_layers(model)
    assert (len(found), share_compiled(found)) == (layers, share)


@pytest.mark.parametrize("forward_only", [False, True])
def test_what_cannot_be_compiled_runs_as_written_and_its_line_is_named_once(forward_only):
    model, notices = nn.Sequential(*[Block(asks=True) for _ in range(3)]), []
    x = torch.randn(2, 8)
    expected = model(x)
    compile_layers(model, compilation := Compilation(notices.append), None, forward_only)
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    assert not compilation.active
    assert len(notices) == 1
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "x.sum().item() > 1e9" in text)
    assert f"test_compile.py, line {line}: " in notices[0]


def test_one_compilation_serves_all_layers_in_training_and_none_serves_an_evaluation():
    """Of torch's own layers too, whose hooks are kept; the layers of a copy have weights of their own."""
    torch._dynamo.utils.counters.clear()
    model, notices = encoder(3).eval(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: out + 1)
    x = torch.randn(2, 5, 8, requires_grad=True)
    expected = model(x)
    expected.sum().backward()
    gradient, x.grad = x.grad, None
    for layer in model.layers:
        layer._compiled_call_impl = Compilation(notices.append).wrap(layer._call_impl, None, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = model(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x.grad, gradient)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not notices


@pytest.mark.parametrize(("norm", "known"), [(nn.BatchNorm2d(4), True), (nn.GroupNorm(2, 4), False)])
def test_images_pass_convolutions_with_channels_innermost(norm, known):
    model, x = Convolutions(norm), torch.randn(2, 4, 6, 6)
    expected = model(x)
    handles = use_channels_last(model)
    seen = []
    model.body[0].register_forward_hook(lambda module, args, out: seen.append(args[0].stride(1)))
    torch.testing.assert_close(model(x), expected)
    assert seen == [1]
    assert len(handles) == 1
    assert prefers_channels_last(model) is known


class Stack(Workload):
    """Three blocks that can be compiled; `asks` makes them wait for a value."""

    asks = False

    def model(self):
        return nn.Sequential(*[Block(asks=self.asks) for _ in range(3)], nn.Linear(8, 2))

    def data(self, split):
        draw = torch.Generator().manual_seed(0)
        rows = torch.randn(32, 8, generator=draw), torch.randint(0, 2, (32,), generator=draw)
        return rows if split == "train" else None

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


class Asking(Stack):
    asks = True


@pytest.mark.parametrize(("kind", "wrong"), [(Stack, 0), (Asking, 1)])
def test_a_run_is_compiled_as_asked_or_says_once_why_not(kind, wrong, tmp_path):
    """On CPU cores too; the losses are those of the run that is not compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    values = {"workload": f"{__name__}:{kind.__name__}", "parallel": {"device": "cpu", "threads": 1}}
    spec = build_spec({**values, "train": {"steps": 4, "global_batch": 8, "lr": 1e-2, "log_every": 1}})
    runs = [train(spec.replace({"train.compile": way}), tmp_path, show=False) for way in ("off", "on")]
    first, second = ([step["loss"] for step in steps_of(run)] for run in runs)
    assert first == pytest.approx(second, rel=1e-5)
    events = list(read_events(RunDir(runs[1].path).events_file(0)))
    (start,) = (event for event in events if event["kind"] == "start")
    assert start["execution"].startswith("compiled by layer")
    assert sum(event["kind"] == "notice" for event in events) == wrong
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) is not bool(wrong)


def test_shapes_that_change_every_step_end_compilation_once(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compile_module, "RECOMPILE_LIMIT", 3)
    block, notices = Block(), []
    with torch._dynamo.config.patch(recompile_limit=3):
        call = Compilation(notices.append).wrap(block.forward, dynamic=False, backend="aot_eager")
        for rows in range(2, 9):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(call(x), block(x))
    assert len(notices) == 1
