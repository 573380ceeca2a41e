"""DeepSpeed's sections in the words of a run file: names, defaults, and the rates of DeepSpeed's own schedulers."""

import re
import warnings

import pytest
import torch

from paceline.config import Train, build_spec
from paceline.trainer.engines.deepspeed_config import translate_sections
from paceline.trainer.optim.schedule import build_schedule

WARM = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}
SCHEDULERS = {
    "WarmupLR": WARM,
    "WarmupDecayLR": {**WARM, "total_num_steps": 20, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_min_ratio": 0.1},
}


def keys_of(config):
    found = translate_sections(config)
    assert not [one for one in found if one.refusal], found
    return {key: value for one in found for key, value in one.keys.items()}


def test_the_optimiser_of_the_guide():
    params = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
    assert keys_of({"optimizer": {"type": "AdamW", "params": params}}) == {
        "train.optimizer": "adamw",
        "train.lr": 1e-4,
        "train.beta1": 0.9,
        "train.beta2": 0.95,
        "train.eps": 1e-8,
        "train.weight_decay": 0.01,
        "train.decay": "all",
    }


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        ({"type": "Adam"}, {"train.optimizer": "adamw", "train.weight_decay": 0.0}),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
            {"train.optimizer": "adam", "train.weight_decay": 0.1, "train.decay": "all"},
        ),
        (
            {"type": "SGD", "params": {"momentum": 0.9, "nesterov": True, "lr": "auto"}},
            {"train.optimizer": "sgd", "train.weight_decay": 0.0, "train.momentum": 0.9, "train.nesterov": True},
        ),
        ({"type": "auto", "params": {"lr": "auto", "betas": "auto"}}, {}),
    ],
)
def test_what_is_not_said_is_as_deepspeed_has_it(said, keys):
    assert keys_of({"optimizer": said}) == keys


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"optimizer": {"type": "Lamb", "params": {"max_coeff": 10}}}, "optimizer.params.max_coeff"),
        ({"scheduler": {"type": "LRRangeTest"}}, "scheduler.type"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(config, name):
    assert [one.name for one in translate_sections(config) if one.refusal] == [name]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"optimizer": "AdamW"}, 'optimizer: "AdamW" is not a section'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, "optimizer.params.lr: 'fast' is not a number"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "optimizer.params.betas: 0.9 is not a pair"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}}, "1.5 is not a whole number"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1.0}}}, "needs warmup_max_lr"),
        ({"fp16": {"enabled": True, "initial_scale_power": 100000}}, "is no loss scale"),
        ({"fp16": {"enabled": True, "initial_scale_power": None}}, "None is not a number"),
        ({"fp16": {"enabled": "maybe"}}, "'maybe' is not true or false"),
    ],
)
def test_a_value_of_another_kind_is_named(config, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        translate_sections(config)


def test_the_loss_scale():
    said = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500, "hysteresis": 2}
    assert keys_of({"fp16": said}) == {
        "train.precision": "fp16",
        "train.loss_scale": "dynamic",
        "train.loss_scale_start": 65536.0,
        "train.loss_scale_window": 500,
    }
    assert keys_of({"fp16": {"enabled": True, "loss_scale": 128}})["train.loss_scale"] == 128
    assert keys_of({"fp16": {"enabled": False, "loss_scale": 128}}) == {}


def test_the_learning_rate_of_the_scheduler_counts():
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}},
    }
    assert keys_of(config)["train.lr"] == 1e-4


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_rates_are_those_of_deepspeeds_own_scheduler(kind):
    """DeepSpeed asks its scheduler after an update: what it finds at i is the rate of update i + 1. The cosine counts
    with that, the warm-up does not and is a step late."""
    lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    params = SCHEDULERS[kind]
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "scheduler": {"type": kind, "params": params}}
    values = {key.removeprefix("train."): value for key, value in keys_of(config).items()}
    train = build_spec({"train": {"steps": 20, "global_batch": 4, **values}}).train
    assert isinstance(train, Train)
    ours = [build_schedule(train, 80)(4 * step) for step in range(20)]

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    theirs = []
    for _ in range(20):
        scheduler.step()
        theirs.append(float(optimizer.param_groups[0]["lr"]))
    warm = 5 if kind == "WarmupCosineLR" else 20
    assert theirs[:warm] == pytest.approx(ours[:warm], rel=1e-6)
    assert theirs[warm:-1] == pytest.approx(ours[warm + 1 :], rel=1e-6)
