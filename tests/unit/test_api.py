"""`train` and the other verbs from Python: what they take as a run, and that every door applies the plan."""

from functools import partial
from pathlib import Path

import pytest
import torch
from noisy_data import NoisyData

from paceline import Workload, plan, train
from paceline.config import load, resolve_spec
from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.trials.runner import train_trial
from paceline.workload import build_workload
from paceline.workloads.ensemble.passes import train_member

RECIPE = Path(__file__).parents[2] / "recipes" / "lm_7b.yaml"
QUICK = {"train": {"steps": 2, "global_batch": 4}}


def test_a_run_is_meant_in_any_of_four_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text("workload: topics\nname: some\ndata: {path: counts.npz}\n")
    spec = load(file)
    content = {"workload": "topics", "name": "some", "data": {"path": "counts.npz"}}
    for source in (spec, file, str(file), content):
        assert resolve_spec(source).dump() == spec.dump()
    assert content["data"] == {"path": "counts.npz"}, "what is given stays as it was"
    assert resolve_spec(NoisyData).workload.endswith("noisy_data.py:NoisyData")
    assert isinstance(build_workload(resolve_spec(NoisyData)), Workload)


def test_verbs_take_them(tmp_path):
    content = {"workload": resolve_spec(NoisyData).workload, **QUICK}
    run = train(content, tmp_path, show=False)
    assert run.summary.trained.steps == 2
    assert plan({"workload": "lm"}, cluster="2xA100", samples=1000).rows


@pytest.mark.parametrize(
    "source", [5, int, type("Local", (Workload,), {"__module__": "__main__"}), "nowhere.yaml"], ids=str
)
def test_what_is_no_run_is_rejected(source):
    with pytest.raises(UserError):
        train(source)


@pytest.mark.parametrize(
    "init", ["def __init__(self):\n        pass", "def __init__(self, spec):\n        pass"], ids=["none", "lost"]
)
def test_an_own_init_takes_the_spec_and_passes_it_on(init, tmp_path):
    file = tmp_path / "own.py"
    methods = "".join(f"    def {name}(self, *words):\n        pass\n" for name in ("model", "data", "loss"))
    file.write_text(f"from paceline import Workload\n\n\nclass Own(Workload):\n    {init}\n{methods}")
    with pytest.raises(UserError, match=r"def __init__\(self, spec\)"):
        train({"workload": f"{file}:Own"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in (
        ["own.py"],
        ["own.py", "__pycache__"],
        ["__pycache__", "own.py"],
    )


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="the devices of the plan are here")
def test_a_plan_for_devices_that_are_not_here_is_not_carried_out_on_cores(tmp_path):
    with pytest.raises(UserError, match=r"plan takes \d CUDA"):
        train({"cluster": "8xA100", "parallel": "auto", "data": {"source": "docstrings"}}, tmp_path)
    assert not list(tmp_path.iterdir())


class Opened(Exception):
    """Raised in place of opening a run, with the spec that would have been trained."""


DOORS = {
    "train": train,
    "resume or start": partial(train, resume_or_start=True),
    "sweep": train_trial,
    "ensemble": train_member,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_applies_the_plan(door, tmp_path, monkeypatch):
    def open_run(spec, *_, **__):
        raise Opened(spec)

    monkeypatch.setattr("paceline.api.open_run", open_run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    spec = load(RECIPE, ["parallel=auto", "cluster=1x8xH100"])
    with pytest.raises(Opened) as opened:
        DOORS[door](spec, tmp_path)
    layout = layout_of(opened.value.args[0])
    assert (layout.strategy, layout.ranks) == ("fsdp", 8)
