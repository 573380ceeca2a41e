"""Groups, an own optimiser and schedule, averaged weights, clipping by value and callbacks: the same on any layout, and
exact on resume."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import paceline
from paceline import train
from paceline.errors import UserError
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import compute_relative_difference
from results import assert_same_bits, check_holds, steps_of, tensors_of

pytestmark = pytest.mark.usefixtures("warm_ranks")

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_training.py"
OWN = """
import json, os
from pathlib import Path
import torch
from own_training_example import OwnTraining

class Told(OwnTraining):
    def on_step(self, step, values):
        rank = os.environ.get("RANK", "0") if not torch.distributed.is_initialized() else torch.distributed.get_rank()
        with (Path(__file__).parent / f"told-{self.spec.name}-{rank}").open("a") as file:
            file.write(json.dumps([step, values]) + "\\n")
        self.callback_state["sum"] = self.callback_state.get("sum", 0.0) + values["loss"]
        one_says_so = step == 10 and str(rank) == str(self.spec.parallel.ranks - 1)
        return f"enough after {self.callback_state['sum']:.6f}" if one_says_so else None

class ByMatrix(OwnTraining):
    def optimizer(self, groups):
        return torch.optim.Adafactor(groups)

class Numbers(OwnTraining):
    def optimizer(self, groups):
        return Momentum(groups, {"lr": 1e-2})

class Momentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["steps"], state["first"] = 0, p.clone()
                state["steps"] += 1
                p.add_(p.grad + 0.01 * (p - state["first"]), alpha=-float(group["lr"]) / state["steps"])
"""
LAYOUTS = {"single": 1, "ddp": 2, "zero1": 2, "fsdp": 2}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_training_example.py").write_text(EXAMPLE.read_text())
    (folder / "own.py").write_text("import sys; sys.path.insert(0, __file__.rpartition('/')[0])\n" + OWN)

    def spec(kind, strategy, **more):
        train = {"steps": 40, "global_batch": 50, "lr": 5e-3, "ema": 0.9, "clip_value": 0.02, "patience": 9}
        train |= {"groups": {"layers.0.*": {"lr": 1e-3}}, "evaluate_every": 4, "checkpoint_every": 4, "keep": 9}
        parallel = {"strategy": strategy, "ranks": LAYOUTS[strategy], "threads": 1, "timeout_s": 120}
        run = {"name": strategy, "workload": f"{folder / 'own.py'}:{kind}"}
        return paceline.config.build_spec({**run, "train": {**train, **more}, "parallel": parallel})

    spec.folder = folder
    return spec


@pytest.fixture(scope="module")
def runs(own, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return {strategy: train(own("Told", strategy), out, show=False) for strategy in LAYOUTS}


def test_the_answer_does_not_depend_on_the_layout(runs):
    alone, wanted = runs["single"], tensors_of(runs["single"])
    for result in runs.values():
        found = tensors_of(result)
        for name, tensor in wanted.items():
            assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-6), name
        assert compute_relative_difference(result.metrics["loss"], alone.metrics["loss"]) < 1e-5


def test_averages_are_used_and_frozen_weights_stay(runs, own):
    """The average is what is evaluated and exported; the raw weights are beside it."""
    result = runs["single"]
    raw, used = tensors_of(result, "model."), result.weights()
    everything = tensors_of(result)
    assert torch.equal(used["head.weight"], everything["ema.head.weight"])
    assert not torch.equal(used["head.weight"], everything["model.head.weight"])
    assert "ema.features.weight" not in everything
    assert "optim.features.weight.exp_avg" not in everything
    assert everything["optim.head.weight.mu_product"] < 1
    workload = paceline.workload.build_workload(own("Told", "single"))
    torch.manual_seed(0)
    model = workload.model()
    assert torch.equal(model.features.weight, raw["features.weight"])
    model.load_state_dict(used)
    x, y = workload.data("test")
    assert float(((model(x) - y) ** 2).mean().detach()) == pytest.approx(result.metrics["loss"], rel=1e-5)


def test_callbacks_see_the_same_on_every_rank_and_one_of_them_ends_the_run(runs, own):
    for strategy, result in runs.items():
        told = [(own.folder / f"told-{strategy}-{rank}").read_text() for rank in range(LAYOUTS[strategy])]
        assert len(set(told)) == 1
        lines = [json.loads(line) for line in told[0].splitlines()[:10]]
        assert [step for step, _ in lines] == list(range(1, 11))
        assert lines[-1][1]["samples"] == 500
        assert result.status == "finished"
        assert result.summary.trained.steps == 10
        assert result.summary.why.startswith("enough after ")
        (done,) = read_events(RunDir(result.path).events_file(0), "done")
        assert (done["step"], done["why"]) == (10, result.summary.why)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_killed_run_ends_as_if_nothing_had_happened(runs, own, strategy, tmp_path):
    whole = runs[strategy]
    folder = tmp_path / strategy
    shutil.copytree(whole.path, folder)
    for late in (*(folder / "checkpoints").glob("step-*8"), *(folder / "checkpoints").glob("step-*10")):
        shutil.rmtree(late)
    (folder / "summary.json").unlink()
    again = paceline.resume(folder, show=False)
    assert again.summary.why == whole.summary.why
    assert again.metrics == whole.metrics
    ours, theirs = ([(s["loss"], s["grad_norm"], s["lr"]) for s in steps_of(run)] for run in (again, whole))
    assert ours == theirs
    assert_same_bits(tensors_of(again), tensors_of(whole))


def test_an_optimiser_of_whole_matrices_is_refused_where_ranks_hold_rows(own, tmp_path):
    with pytest.raises(UserError, match="Adafactor does not"):
        train(own("ByMatrix", "zero1"), tmp_path, show=False)
    assert train(own("ByMatrix", "ddp", steps=2), tmp_path, show=False).status == "finished"


def test_state_of_an_optimiser_that_is_not_a_tensor_is_resumed(own, tmp_path):
    """Its count of steps is a number, and what it starts from is not zero."""
    spec = own("Numbers", "single", steps=8)
    whole = train(spec, tmp_path, show=False)
    shutil.rmtree(whole.path / "checkpoints" / "step-00000008")
    before = tensors_of(whole)
    assert before["optim.head.weight.steps"] == 4
    again = paceline.resume(whole.path, show=False)
    assert tensors_of(again)["optim.head.weight.steps"] == 8
    assert again.metrics == whole.metrics


def test_weighted_classes_and_smoothed_labels_do_not_depend_on_the_layout(small):
    spec = small.replace({"model.class_weights": "balanced", "model.label_smoothing": 0.1, "train.ema": 0.9})
    check_holds(spec, layouts=["single", "ddp:2"], steps=4)
