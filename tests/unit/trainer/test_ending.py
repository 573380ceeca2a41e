"""Runs that end before their last step, and requests that contradict themselves."""

import pytest

import paceline
from paceline import train
from paceline.config import build_spec
from paceline.errors import PacelineError, UserError
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from results import expect_error, tensors_of

OWN = """
import torch
from torch import nn
from paceline import Workload

class Flat(Workload):
    score = "-flat"

    def model(self):
        return nn.Linear(2, 1)

    def data(self, split):
        draw = torch.Generator().manual_seed(0)
        return torch.randn(40, 2, generator=draw), torch.randn(40, 1, generator=draw)

    def loss(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(y)

    def evaluate(self, model, batch):
        return {**super().evaluate(model, batch), "flat": len(batch[0])}

class Alone(Flat):
    def data(self, split):
        return super().data(split) if split == "train" else None

class Stubborn(Flat):
    def on_evaluate(self, step, metrics):
        return True

class Scheduled(Flat):
    def schedule(self, seen, total):
        return 1 - 2 * seen / total

class Half(Flat):
    def optimizer(self, groups):
        return torch.optim.SGD(groups[:1])

class Sums(Flat):
    def optimizer(self, groups):
        return torch.optim.Adagrad(groups, initial_accumulator_value=0.5)

class Again(Flat):
    def optimizer(self, groups):
        return torch.optim.LBFGS([p for group in groups for p in group["params"]])

class Never(Flat):
    def optimizer(self, groups):
        return None
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)

    def spec(kind, parallel=None, **more):
        values = {"steps": 20, "global_batch": 8, "evaluate_every": 2, **more}
        parallel = {"threads": 1, **(parallel or {})}
        return build_spec({"workload": f"{file}:{kind}", "train": values, "parallel": parallel})

    return spec


def test_patience_ends_a_run_and_more_of_it_goes_on(own, tmp_path):
    result = train(own("Flat", patience=3, ema=0.5), tmp_path, show=False)
    assert result.status == "finished"
    assert result.summary.trained.steps == 8
    assert result.summary.why == "3 evaluations without a better flat (train.patience=3)"
    (done,) = read_events(RunDir(result.path).events_file(0), "done")
    assert done["step"] == 8
    assert paceline.resume(result.path, show=False).summary == result.summary
    further = paceline.resume(result.path, ["train.patience=5"], show=False)
    assert further.summary.trained.steps == 12


def test_an_optimiser_may_have_state_before_its_first_step(own, tmp_path):
    result = train(own("Sums", steps=2, lr=0.1), tmp_path, show=False)
    kept = tensors_of(result, "optim.")
    assert kept["weight.step"] == 2
    assert (kept["weight.sum"] > 0.5).all()


@pytest.mark.parametrize(
    ("kind", "more", "code", "key"),
    [
        ("Alone", {"patience": 2}, "conflict", "train.patience"),
        ("Stubborn", {}, "invalid-workload", "on_evaluate"),
        ("Scheduled", {}, "invalid-workload", "schedule"),
        ("Scheduled", {"warmup": 0.2}, "conflict", "train.warmup"),
        ("Half", {"optimizer": "sgd"}, "conflict", "train.optimizer"),
        ("Half", {}, "invalid-workload", "optimizer"),
        ("Again", {}, "invalid-workload", "optimizer"),
        ("Never", {}, "invalid-workload", "optimizer"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(own, tmp_path, kind, more, code, key):
    with expect_error(code, key, PacelineError) as caught:
        train(own(kind, **more), tmp_path, show=False)
    assert "\n" not in str(caught.value).split("\n\n")[0]


def test_an_average_needs_a_common_model(own, tmp_path):
    with pytest.raises(UserError, match=r"^train\.ema=0\.9"):
        train(own("Flat", {"reduce": "local_sgd", "strategy": "ddp"}, ema=0.9), tmp_path, show=False)
