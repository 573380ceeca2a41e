"""Products in fp8: near those in fp32, with gradients, in place of the linear layers whose sizes suit; and in TF32."""

import pytest
import torch
from torch import nn

from paceline.parallel import precision
from paceline.parallel.precision import Fp8Linear, scale_to_fp8, set_tf32, use_fp8

CPU = torch.device("cpu")


def apart(ours, theirs):
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_near(bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32, bias=bias), torch.randn(3, 16, 64, requires_grad=True)
    names, wanted = list(dict(layer.named_parameters())), [x, *layer.parameters()]
    exact = layer(x)
    incoming = torch.randn_like(exact)
    theirs = torch.autograd.grad(exact, wanted, incoming)
    use_fp8([nn.Sequential(layer)], CPU)
    ours = layer(x)
    assert ours.dtype == torch.bfloat16
    assert list(dict(layer.named_parameters())) == names
    assert 1e-3 < apart(ours, exact) < 0.06
    for mine, reference in zip(torch.autograd.grad(ours, wanted, incoming.bfloat16()), theirs, strict=True):
        assert mine.dtype == reference.dtype
        assert apart(mine, reference) < 0.08


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_any_number_of_rows_is_multiplied_in_sizes_that_devices_take(rows, monkeypatch):
    torch.manual_seed(0)
    sizes, product = [], precision.compute_fp8_product
    monkeypatch.setattr(
        precision, "compute_fp8_product", lambda a, b: sizes.extend((*a[0].shape, *b[0].shape)) or product(a, b)
    )
    layer, x = nn.Linear(64, 32), torch.randn(rows, 64, requires_grad=True)
    theirs = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    use_fp8([nn.Sequential(layer)], CPU)
    ours = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    assert len(sizes) == 3 * 4
    assert not any(size % precision.ALIGNED for size in sizes)
    for mine, reference in zip(ours, theirs, strict=True):
        assert apart(mine, reference) < 0.1


def test_layers_of_other_sizes_stay_as_they_are():
    fits, odd, norm = nn.Linear(32, 16), nn.Linear(32, 10), nn.LayerNorm(32)
    use_fp8([nn.Sequential(fits, odd, norm)], CPU)
    assert (type(fits), type(odd), type(norm)) == (Fp8Linear, nn.Linear, nn.LayerNorm)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_largest_number_becomes_the_largest_that_the_type_holds(kind):
    x = torch.tensor([[0.5, -3.0], [1e-3, 0.0]])
    narrow, scale = scale_to_fp8(x, kind)
    assert float(narrow.float().abs().max()) == torch.finfo(kind).max
    assert apart(narrow.float() * scale, x) < 0.1
    nothing, scale = scale_to_fp8(torch.zeros(2, 2), kind)
    assert float(scale) > 0
    assert not nothing.float().any()


@pytest.fixture
def products_as_before():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("products_as_before")
def test_products_take_tf32_only_where_it_was_asked_for():
    set_tf32("fp32")
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, True), "torch's own"
    set_tf32("tf32")
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)
