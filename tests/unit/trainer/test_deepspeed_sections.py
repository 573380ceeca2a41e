"""DeepSpeed's sections in the words of a run file: names, defaults, and the rates of DeepSpeed's own schedulers."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from paceline.config import Train, build_spec
from paceline.trainer.engines.deepspeed_config import translate_sections
from paceline.trainer.optim.schedule import build_schedule

CASES = yaml.safe_load(Path(__file__).with_name("deepspeed_sections.yaml").read_text())
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


@pytest.mark.parametrize(("config", "keys"), CASES["keys"])
def test_a_section_becomes_keys(config, keys):
    assert keys_of(config) == keys


@pytest.mark.parametrize(("config", "name"), CASES["refused"])
def test_what_is_not_offered_is_refused_by_its_name(config, name):
    assert [one.name for one in translate_sections(config) if one.refusal] == [name]


@pytest.mark.parametrize(("config", "said"), CASES["invalid"])
def test_a_value_of_another_kind_is_named(config, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        translate_sections(config)


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
