"""Weights in 4 bits: levels, rounding, gradients, and what the planner takes them to be."""

import pytest
import torch
import torch.nn.functional as F

from paceline.nn.nf4 import (
    BLOCK,
    BLOCK_BYTES,
    PackedTarget,
    can_quantise,
    count_elements,
    pack,
    quantise_linear,
    unpack,
)
from paceline.planner.formulas.shape import PACKED_BLOCK, PACKED_BYTES


@pytest.fixture
def weight():
    return torch.randn(48, 4 * BLOCK, generator=torch.Generator().manual_seed(0))


def test_bytes_are_those_that_the_plan_counts(weight):
    packed = pack(weight)
    assert (BLOCK, BLOCK_BYTES / BLOCK) == (PACKED_BLOCK, PACKED_BYTES)
    assert packed.nbytes == PACKED_BYTES * weight.numel()
    assert count_elements(packed) == weight.numel()


def test_values_are_the_nearest_levels_and_stay_when_packed_again(weight):
    found = unpack(pack(weight), torch.float32)
    error = (found - weight).abs().unflatten(-1, (-1, BLOCK)) / weight.abs().unflatten(-1, (-1, BLOCK)).amax(-1, True)
    assert error.max() < 0.16
    assert float(error.mean()) == pytest.approx(0.029, abs=0.005)
    assert unpack(pack(found), torch.float32).equal(found)
    assert unpack(pack(torch.zeros(2, BLOCK)), torch.float32).equal(torch.zeros(2, BLOCK))


def test_the_values_are_those_of_bitsandbytes(weight):
    functional = pytest.importorskip("bitsandbytes").functional
    theirs = functional.dequantize_4bit(*functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4"))
    found = unpack(pack(weight), torch.float32)
    assert (found - theirs).abs().mean() < 5e-3 * theirs.abs().mean(), "they keep scales in fp32"


def test_a_layer_multiplies_by_what_it_holds_and_gives_its_input_a_gradient(weight):
    layer, x = torch.nn.Linear(weight.shape[1], 48), torch.randn(3, 5, weight.shape[1], requires_grad=True)
    assert can_quantise(layer)
    assert not can_quantise(torch.nn.Linear(BLOCK + 1, 4))
    quantise_linear(layer)
    target = PackedTarget(layer.weight)
    assert target.shape == tuple(weight.shape)
    target.copy_(weight)
    assert not target.isnan().any()
    plain = F.linear(x, unpack(layer.weight, torch.float32), layer.bias)
    found = layer(x)
    torch.testing.assert_close(found, plain)
    for out in (found, plain):
        out.square().sum().backward()
    assert layer.weight.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
