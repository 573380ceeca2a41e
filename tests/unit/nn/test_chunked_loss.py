"""The chunked loss: the numbers of plain cross-entropy, without ever holding its logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.nn.chunked_loss import compute_chunked_losses, split_vocabulary

B, S, D, V = 3, 7, 8, 11


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    x, weight = torch.randn(B, S, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    targets = torch.randint(0, V, (B, S))
    targets[1, 3:] = -100
    targets[2] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


def plain(x, weight, targets):
    losses = F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).sum(1)


@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000])
def test_losses_and_gradients_are_those_of_cross_entropy(chunk):
    x, weight, targets = inputs()
    ours, theirs = compute_chunked_losses(x, weight, targets, chunk), plain(x, weight, targets)
    assert ours.shape == (B,)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert ours[2] == 0
    grads = (torch.autograd.grad(3.5 * losses.sum(), (x, weight)) for losses in (ours, theirs))
    for mine, reference in zip(*grads, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


def test_huge_logits_do_not_overflow():
    x, weight, targets = inputs(torch.float32)
    losses = compute_chunked_losses(x * 1e4, weight * 1e4, targets)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_half_and_the_rest_is_not(half):
    x, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", half):
        losses = compute_chunked_losses(x, weight, targets, 4)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    expected = torch.autograd.grad(plain(x, weight, targets).sum(), (x, weight))
    assert not torch.equal(x.grad, expected[0])
    for mine, reference in zip((x.grad, weight.grad), expected, strict=True):
        assert (mine - reference).abs().max() < 0.05 * reference.abs().max()


def test_weights_in_half_precision_get_gradients_of_their_type():
    x, weight, targets = inputs(torch.bfloat16)
    losses = compute_chunked_losses(x, weight, targets)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_without_gradients_none_are_computed():
    x, weight, targets = inputs()
    with torch.no_grad(), Largest() as seen:
        losses = compute_chunked_losses(x, weight, targets, 4)
    assert not losses.requires_grad
    assert "aten.addmm_.default" not in seen.ops
    torch.testing.assert_close(losses, plain(x, weight, targets).detach())


class Largest(TorchDispatchMode):
    """Notes the operations and the largest tensor any of them made."""

    def __init__(self):
        super().__init__()
        self.ops, self.numel = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops.add(str(func))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_logits_never_fill_memory():
    tokens, vocab, width, chunk = 512, 300, 4, 16
    x, weight = torch.randn(1, tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    with Largest() as seen:
        compute_chunked_losses(x, weight, torch.randint(0, vocab, (1, tokens)), chunk).sum().backward()
    assert seen.numel == chunk * vocab < tokens * vocab / 10


def test_different_gradients_per_sample_are_refused():
    x, weight, targets = inputs()
    with pytest.raises(RuntimeError, match="sum the losses"):
        compute_chunked_losses(x, weight, targets)[0].backward()


@pytest.mark.parametrize(("vocab", "parts"), [(11, 2), (8, 4), (5, 4), (3, 4)])
def test_rows_of_a_vocabulary_are_those_of_torch_chunk(vocab, parts):
    expected = [len(piece) for piece in torch.arange(vocab).chunk(parts)]
    found = [split_vocabulary(vocab, parts, part) for part in range(parts)]
    assert [rows for _, rows in found] == expected + [0] * (parts - len(expected))
    assert all(first + rows <= vocab for first, rows in found)
