"""Accelerate on a CUDA device: the curve of one device without it, and checkpoints that go on without it."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from engine_rows import at_half, train_all

from paceline import resume, train
from paceline.launch.local import run_ranks
from paceline.layout import layout_of
from paceline.runlog.run_dir import RunDir
from paceline.trainer import engines
from results import steps_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

if find_spec("accelerate") is None:
    pytest.skip("needs  pip install 'paceline[accelerate]'", allow_module_level=True)

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 5e-3}
WAYS = {
    "ddp": {},
    "fsdp": {},
    "zero2": {},
    "fsdp in passes": {"parallel.strategy": "fsdp", "parallel.micro_batch": 5},
}
"""Named by their strategy, or with what else differs."""
ROWS = [(way, precision) for precision in TOLERANCE for way in WAYS]
LIES = {"whole": "asked for layers gathered one by one 4 and has 0", "alone": "asked for kind FSDP and has NO"}
"""How Accelerate may get something else than was asked for, and how the run ends."""


def furthest(ours, theirs):
    """Largest relative differences of (loss, gradient norm) over all steps; everything else is the same."""
    for one, two in zip(ours, theirs, strict=True):
        for key in ("step", "samples", "batch", "lr"):
            assert one[key] == two[key], key
    return [
        max(abs(one[key] - two[key]) / abs(two[key]) for one, two in zip(ours, theirs, strict=True))
        for key in ("loss", "grad_norm")
    ]


@pytest.fixture(scope="module")
def plain(tiny_lm, tmp_path_factory):
    """By precision: (spec, steps) of one device under `torch`, without compilation."""
    out, found = tmp_path_factory.mktemp("plain"), {}
    for precision in TOLERANCE:
        changes = {"train.precision": precision, "train.compile": "off", "train.checkpoint_every": 10}
        spec = tiny_lm.replace({**changes, "train.keep": 9, "parallel.strategy": "single"})
        found[precision] = (spec, steps_of(train(spec, out / precision, show=False).path))
    return found


@pytest.fixture(scope="module")
def runs(plain, tmp_path_factory):
    out = tmp_path_factory.mktemp("rows")

    def claimed(name, way, precision):
        changes = {"parallel.engine": "accelerate", "parallel.strategy": way, **WAYS[way]}
        spec = plain[precision][0].replace(changes)
        engines.check_engine(spec, layout_of(spec), {})
        return str(RunDir.claim(out, name, spec).path), spec

    rows = {row: claimed(f"row-{number}", *row) for number, row in enumerate(ROWS)}
    lies = [(lie, *claimed(lie, "fsdp", "fp32")) for lie in LIES]
    (failed,) = run_ranks(train_all, (list(rows.values()), lies, "cuda"), 1)
    return {row: folder for row, (folder, _) in rows.items()}, failed


@pytest.mark.parametrize(("way", "precision"), ROWS)
def test_accelerate_follows_one_device_without_it(plain, runs, way, precision):
    folder = runs[0][way, precision]
    loss, norm = furthest(steps_of(folder), plain[precision][1])
    print(f"accelerate {way} {precision}: loss {loss:.1e}, gradient norm {norm:.1e}")
    assert max(loss, norm) <= TOLERANCE[precision]
    assert json.loads((Path(folder) / "summary.json").read_text())["status"] == "finished"
    kept = yaml.safe_load((Path(folder) / "accelerate.yaml").read_text())
    assert kept["distributed_type"] == ("NO" if way == "ddp" else "FSDP")
    assert kept.get("fsdp_config", {}).get("fsdp_reshard_after_forward", way == "fsdp") == way.startswith("fsdp")


@pytest.mark.parametrize("lie", LIES)
def test_the_wrapper_is_what_was_asked_for_or_the_run_ends(runs, lie):
    assert LIES[lie] in runs[1][lie]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_sharded_run_goes_on_under_torch(plain, runs, tmp_path, precision):
    folder = at_half(runs[0]["fsdp", precision], tmp_path / "run")
    resumed = resume(folder, ["parallel.engine=torch", "parallel.strategy=single"], show=False)
    assert max(furthest(steps_of(resumed.path), plain[precision][1])) <= TOLERANCE[precision]


def test_through_the_front_door(plain, tmp_path):
    spec, steps = plain["fp32"]
    run = train(spec.replace({"parallel.engine": "accelerate", "parallel.strategy": "zero3"}), tmp_path, show=False)
    assert max(furthest(steps_of(run.path), steps)) <= TOLERANCE["fp32"]
    assert run.summary.peak_bytes_per_rank[0] > 0
