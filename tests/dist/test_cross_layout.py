"""A run that was saved under one layout goes on under another as if nothing had happened."""

import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from paceline import RunResult, resume, train
from paceline.inference.export import export
from paceline.layout import parse_layout
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import compare_weights, compute_relative_difference
from results import steps_of

pytestmark = pytest.mark.usefixtures("warm_ranks")

PAIRS = [
    *(("fsdp:4", "single"), ("fsdp:2+tensor:2+pipeline:2", "ddp:2"), ("ddp:2", "tensor:2")),
    *(("tensor:2+sequence", "pipeline:2:interleaved"), ("pipeline:2:1f1b", "zero1:2"), ("zero1:2", "hsdp:2x2")),
    *(("hsdp:2x2", "fsdp:2+tensor:2"), ("single", "zero2:2"), ("context:2", "fsdp:4")),
    ("hsdp:2x2", "fsdp:2+context:2"),
]
STEPS, HALF = 4, 2
IN_ONE_FILE = ("fsdp:4", "pipeline:2:1f1b", "zero1:2")
"""Layouts that save all tensors in one file."""


def parallel(words):
    """The whole of a layout: what the words do not name goes back to what it is without them."""
    plain = {"replicate": None, "tensor": 1, "context": 1, "sequence": False, "pipeline": 1, "schedule": "1f1b"}
    return {f"parallel.{key}": value for key, value in {**plain, **parse_layout(words)}.items()}


@pytest.fixture(scope="module")
def halfway(tiny_lm, tmp_path_factory):
    """A run under a layout, cut off after half of its steps; with the uninterrupted one it must equal."""
    out = tmp_path_factory.mktemp("halfway")
    spec = tiny_lm.replace({"train.steps": STEPS, "train.checkpoint_every": HALF, "train.evaluate_on": 8})
    made = {}

    def run(words):
        if words not in made:
            kind = {"train.checkpoint_format": "full" if words in IN_ONE_FILE else "sharded"}
            made[words] = train(spec.replace(parallel(words) | kind), out, show=False).path
        return made[words]

    return run


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_any_layout_goes_on_from_any_other(halfway, tmp_path, saved, resumed):
    folder = tmp_path / "run"
    shutil.copytree(halfway(saved), folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08d}")
    result = resume(folder, parallel(resumed) | {"train.checkpoint_format": "sharded"}, show=False)
    assert result.status == "finished"
    whole, ours = steps_of(halfway("single")), steps_of(folder)
    assert [event["step"] for event in ours] == list(range(1, STEPS + 1))
    for a, b in zip(whole, ours, strict=True):
        assert (a["samples"], a["tokens"], a["lr"]) == (b["samples"], b["tokens"], b["lr"])
        for key in ("loss", "grad_norm"):
            assert compute_relative_difference(a[key], b[key]) <= 1e-5, f"{key} at step {a['step']}"
    with (
        safe_open(export(halfway("single"), tmp_path / "one.safetensors"), "pt") as one,
        safe_open(export(folder, tmp_path / "other.safetensors"), "pt") as other,
    ):
        assert sorted(one.keys()) == sorted(other.keys())
        for name in one.keys():  # noqa: SIM118
            a, b = one.get_tensor(name), other.get_tensor(name)
            assert a.dtype == b.dtype
            assert float((a - b).norm() / a.norm()) <= 1e-4, name


@pytest.mark.parametrize("words", IN_ONE_FILE)
def test_one_file_holds_the_whole_state_and_needs_no_paceline(halfway, words):
    last = halfway(words) / "checkpoints" / f"step-{STEPS:08d}"
    assert sorted(path.name for path in last.iterdir()) == ["manifest.json", "state.safetensors"]
    found = load_file(last / "state.safetensors")
    weights = {name.removeprefix("model."): it for name, it in found.items() if name.startswith("model.")}
    moments = {name: it for name, it in found.items() if name.startswith("optim.")}
    assert all(it.shape == moments[f"optim.{name}.exp_avg"].shape for name, it in weights.items())
    single = RunResult(halfway("single"), None).weights()
    assert compare_weights(single, weights).value <= 1e-4
    assert {float(moments[f"optim.{name}.step"]) for name in weights} == {STEPS}
    assert float(found["scaler.scale"]) == 1


def test_auto_saves_by_what_a_checkpoint_costs(tiny_lm, tmp_path):
    spec = tiny_lm.replace({"train.steps": 24, "train.evaluate_every": 24, "train.evaluate_on": 8, "parallel.ranks": 2})
    plain = train(spec, tmp_path / "plain", show=False)
    auto = train(spec.replace({"train.checkpoint_every": "auto"}), tmp_path / "auto", show=False)
    lines = [RunDir(auto.path).events_file(rank).read_text().splitlines() for rank in (0, 1)]
    events = [list(map(json.loads, found)) for found in lines]
    saved = [[event["step"] for event in found if event["kind"] == "checkpoint"] for found in events]
    assert saved[0] == saved[1]
    assert saved[0][0] == 20
    (notice,) = [event for event in events[0] if event.get("about") == "checkpoints"]
    assert notice["step"] == 20
    assert [event["loss"] for event in steps_of(plain.path)] == [event["loss"] for event in steps_of(auto.path)]
