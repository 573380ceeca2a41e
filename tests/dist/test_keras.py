"""A Keras model on several ranks: the same answer, also with Dropout; and what would train nothing is refused."""

import textwrap
from pathlib import Path

import pytest

from paceline import train
from paceline.config import build_spec
from paceline.errors import UserError
from paceline.trainer.run import build_resumed_spec
from results import assert_same_bits, check_holds

pytestmark = pytest.mark.usefixtures("warm_ranks")

PARALLEL = {"threads": 1, "timeout_s": 120}
MODELS = Path(__file__).parents[1] / "unit" / "workloads" / "keras" / "models.py"
OWN = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, torch
from paceline import Workload

class Own(Workload):
    def model(self):
        layers = keras.layers
        return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dropout(0.5, seed=3), layers.Dense(1)])
    def data(self, split):
        x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
        return x, x.sum(1)
    def loss(self, model, batch):
        x, y = batch
        return (model(x)[:, 0] - y).square().sum(), len(y)
"""


def run(**arguments):
    model = {"build": f"{MODELS}:build", "arguments": arguments}
    train = {"steps": 4, "global_batch": 12, "lr": 1e-2}
    return build_spec({"workload": "keras", "model": model, "train": train, "parallel": PARALLEL})


def test_the_answer_is_the_same_on_any_layout():
    parity = check_holds(run(dropout=0.4, penalty=0.1, norm=True), layouts=["single", "ddp:4", "zero1:2"], steps=4)
    assert max(row.weights for row in parity.rows) > 0, "the weights were compared"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own_keras.py"
    file.write_text(textwrap.dedent(OWN))
    train = {"steps": 2, "global_batch": 6, "lr": 1e-2, "schedule": "constant", "warmup": 0}
    return build_spec({"workload": f"{file}:Own", "train": train, "parallel": {**PARALLEL, "ranks": 2}})


def test_a_keras_model_in_a_workload_of_ones_own_is_not_divided(own, tmp_path):
    with pytest.raises(UserError, match=r"parallel\.strategy=fsdp"):
        train(own.replace({"parallel.strategy": "fsdp"}), tmp_path, show=False)
    assert not list(tmp_path.iterdir())


def test_seeded_dropout_of_ones_own_goes_on_as_if_never_stopped(own, tmp_path):
    half, whole = (train(own.replace({"train.steps": steps}), tmp_path, show=False) for steps in (2, 4))
    rest = train(build_resumed_spec(half.path, ["train.steps=4"]), resume=half.path, show=False)
    assert rest.weights().keys() == {"dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"}
    assert_same_bits(rest, whole)
