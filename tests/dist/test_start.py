"""Weights to begin with are the same under every layout."""

import pytest
import torch
from safetensors.torch import save_file
from starting import Scaled, built_empty, started

from paceline import train
from paceline.errors import UserError
from paceline.launch.local import run_ranks
from paceline.layout import parse_layout
from results import losses

pytestmark = pytest.mark.usefixtures("warm_ranks")

TWO = ("ddp:2", "zero1:2", "zero2:2", "fsdp:2", "tensor:2", "pipeline:2")
FOUR = ("fsdp:2+tensor:2", "hsdp:2x2", "fsdp:2+pipeline:2")
CONSTANT = {"train.schedule": "constant", "train.warmup": 0.0, "train.steps": 2}


def under(spec, words, **fields):
    return spec.replace({**{f"parallel.{key}": value for key, value in parse_layout(words).items()}, **fields})


@pytest.fixture(scope="module")
def begun(tiny_lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    run = train(under(tiny_lm, "fsdp:2", **CONSTANT), folder, show=False)
    half = {name: value.to(torch.bfloat16) for name, value in run.weights().items()}
    save_file({name: value.float() for name, value in half.items()}, folder / "exact.safetensors")
    save_file(half, folder / "half.safetensors")
    return folder, run.path


@pytest.fixture(scope="module")
def first_loss(tiny_lm, begun):
    folder, _ = begun
    spec = under(tiny_lm, "single", **{"model.init_from": folder / "half.safetensors", "train.steps": 1})
    return losses(train(spec, folder / "single", show=False))[0]


@pytest.mark.parametrize(("ranks", "layouts"), [(2, TWO), (4, FOUR)])
def test_a_file_is_the_same_model_under_every_layout(tiny_lm, begun, first_loss, ranks, layouts):
    folder, _ = begun
    rows = [(words, under(tiny_lm, words, **{"model.init_from": folder / "half.safetensors"})) for words in layouts]
    for found in run_ranks(started, (rows, folder / "exact.safetensors"), ranks):
        for words, (same, held, loss, taken) in found.items():
            assert same, words
            assert loss == pytest.approx(first_loss, rel=1e-5), words
            assert taken >= held, "a stage holds some, the report counts all"


def test_a_model_of_ones_own_is_built_without_memory_where_all_is_given(tmp_path):
    """Not where something is drawn: that needs a model as it is built."""
    torch.manual_seed(0)
    model = Scaled()
    weights, loss = model.state_dict(), model(torch.ones(4, 4)).square().sum().item()
    save_file(weights, tmp_path / "all.safetensors")
    for empty, same, found in run_ranks(built_empty, (tmp_path / "all.safetensors", "all"), 2):
        assert empty
        assert same
        assert found == pytest.approx(loss, rel=1e-5)
    some = {name: value for name, value in weights.items() if name != "1.bias"}
    save_file(some, tmp_path / "some.safetensors")
    for empty, same, _ in run_ranks(built_empty, (tmp_path / "some.safetensors", "some"), 2):
        assert not empty
        assert same


def test_what_one_stage_misses_is_refused_by_all(tiny_lm, begun, tmp_path):
    _, run = begun
    spec = under(tiny_lm, "pipeline:2", **{"model.init_from": run, "model.layers": 5})
    with pytest.raises(UserError, match=r"layers\.4\.attention\.k"):
        train(spec, tmp_path / "runs", show=False)
    assert not list((tmp_path / "runs").iterdir())
