"""Batch norm over groups by its kernels, also under TRITON_INTERPRET=1 on the CPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="no Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def normalise_in_fp64(rows, sizes, weight, bias, eps):
    """Return the normalised rows, with mean and unbiased variance of each group."""
    found, moments = [], []
    for part in rows.split(sizes):
        variance, mean = torch.var_mean(part, 0, correction=0)
        found.append((part - mean) / (variance + eps).sqrt() * weight + bias)
        moments.append(torch.stack([mean, variance * len(part) / (len(part) - 1)]))
    return torch.cat(found), torch.stack(moments)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize(("channels", "sizes"), [(64, [300, 300]), (24, [128, 128, 70]), (130, [70, 72]), (3, [900])])
def test_groups_at_once_are_batch_norms_of_each(channels, sizes, mean, kind):
    from paceline.nn.triton_batch_norm import GroupNormalise

    torch.manual_seed(0)
    rows = (torch.randn(sum(sizes), channels) + mean).to(DEVICE, kind).requires_grad_()
    weight, bias = torch.rand(channels, device=DEVICE) + 0.5, torch.randn(channels, device=DEVICE)
    weight.requires_grad_(), bias.requires_grad_()
    moments = torch.empty(len(sizes), 3, channels, device=DEVICE)
    dy = torch.randn(rows.shape, device=DEVICE).to(kind)
    exact = [one.detach().double().requires_grad_() for one in (rows, weight, bias)]
    normal, expected = normalise_in_fp64(exact[0], sizes, *exact[1:], 1e-5)
    gradients = torch.autograd.grad(normal, exact, dy.double())
    found = GroupNormalise.apply(rows, weight, bias, moments, sizes, 1e-5)
    pairs = [(found, normal), (moments[:, :2], expected)]
    pairs += zip(torch.autograd.grad(found, (rows, weight, bias), dy), gradients, strict=True)
    for place, (ours, theirs) in enumerate(pairs):
        rounded = kind if place in (0, 2) else torch.float32
        tolerance = 8e-3 if rounded == torch.bfloat16 else 2e-5
        assert (ours.double() - theirs).abs().max() < tolerance * theirs.abs().max()
