"""What `optimizer`, `scheduler` and `fp16` of DeepSpeed's JSON say, in the words of a run file.

Where DeepSpeed has another default than Paceline, it is said too: an `AdamW` without more has no weight decay.
The learning rate follows the same curve; DeepSpeed's warm-up is one step late, since it is looked up after an update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
SECTIONS = ("optimizer", "scheduler", "fp16")
RULES = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb", "sgd": "sgd"}
"""DeepSpeed's optimisers that Paceline has; its Adam is AdamW unless `adam_w_mode` is false."""
BETAS, DECAY = ("train.beta1", "train.beta2"), ("train.weight_decay", "train.decay")
SAME = {"lr": "train.lr", "eps": "train.eps", "momentum": "train.momentum", "nesterov": "train.nesterov"}
HARMLESS = {
    **dict.fromkeys(("torch_adam", "fused", "foreach"), "which kernel does the update is Paceline's choice"),
    "adam_w_mode": "train.optimizer says it",
    "last_batch_iteration": "the schedule follows the position of the run",
    "hysteresis": "the loss scale halves at the first overflow",
    "consecutive_hysteresis": "the loss scale halves at the first overflow",
    "min_loss_scale": "a run ends where its loss scale falls below 1",
    "auto_cast": "products are in fp16 whatever comes in",
}
"""Names that change nothing which must be said, and why."""
AS_USUAL = {"bias_correction": True, "amsgrad": False, "dampening": 0, "fp16_master_weights_and_grads": False}
"""Names that may have this value and no other."""


@dataclass(frozen=True)
class Meaning:
    """One name of the JSON, and what it is in a run file."""

    name: str
    value: Any
    keys: dict[str, Any] = field(default_factory=dict)
    """The values of a run file that say the same."""
    note: str = ""
    """Why a run file need not say it."""
    refusal: str = ""
    """Why it is not offered."""


def meanings(config: Mapping[str, Any]) -> list[Meaning]:
    """Of every name in the three sections; one that is `auto` is left to the run file."""
    rate = dict(_scheduler(config))
    own_lr = "train.lr" in {key for one in rate.values() for key in one.keys}
    found = {**dict(_optimizer(config, own_lr)), **rate, **dict(_fp16(config))}
    return [one for one in found.values() if one.value != AUTO]


Named = Iterator[tuple[str, Meaning]]


def _params(config: Mapping[str, Any], section: str) -> tuple[str, dict[str, Any]]:
    """(type, parameters) of the optimiser or the scheduler."""
    said = config.get(section) or {}
    return str(said.get("type", AUTO)), dict(said.get("params") or {})


def _optimizer(config: Mapping[str, Any], lr_from_scheduler: bool) -> Named:
    kind, params = _params(config, "optimizer")
    if not config.get("optimizer"):
        return
    at = "optimizer.type"
    if kind != AUTO and kind.lower() not in RULES:
        yield at, Meaning(at, kind, refusal="train.optimizer is adamw, adam, sgd, lars or lamb")
        return
    rule = RULES.get(kind.lower(), "")
    if kind.lower() == "adam" and params.get("adam_w_mode") is False:
        rule = "adam"
    absent = {"weight_decay": 0.0} | ({"momentum": 0.0} if rule == "sgd" else {})
    missing = {f"train.{name}": value for name, value in absent.items() if name not in params}
    yield at, Meaning(at, kind, {"train.optimizer": rule, **missing})
    for name, value in params.items():
        at = f"optimizer.params.{name}"
        if name == "lr" and lr_from_scheduler:
            yield at, Meaning(at, value, note="the scheduler says it")
        elif name == "betas" and isinstance(value, list) and len(value) == 2:
            yield at, Meaning(at, value, dict(zip(BETAS, map(float, value), strict=True)))
        elif name == "weight_decay" and value != AUTO:
            yield at, Meaning(at, value, dict(zip(DECAY, (value, "all"), strict=True)) if value else {DECAY[0]: 0.0})
        else:
            yield at, _plain(at, name, value, SAME)


def _scheduler(config: Mapping[str, Any]) -> Named:
    kind, params = _params(config, "scheduler")
    if not config.get("scheduler"):
        return
    at = "scheduler.type"
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "OneCycle": "linear"}
    if kind == AUTO or kind not in shapes:
        yield at, Meaning(at, kind, refusal="" if kind == AUTO else f"offered are {', '.join(shapes)}")
        return
    if kind == "OneCycle":
        yield from _one_cycle(params)
        return
    peak, low = params.get("warmup_max_lr"), params.get("warmup_min_lr", 0.0)
    if peak is None and kind == "WarmupDecayLR":
        peak = 0.001
    by_peak = low / peak if low and isinstance(peak, int | float) and low != AUTO else 0.0
    begin = {"train.warmup_from": by_peak} if kind != "WarmupCosineLR" else {}
    end = {"train.final_lr": by_peak} if kind == "WarmupDecayLR" else {}
    defaults: dict[str, Any] = {"train.warmup_steps": 1000} if "warmup_num_steps" not in params else {}
    defaults |= {"train.warmup_shape": "log"} if "warmup_type" not in params else {}
    defaults |= {"train.final_lr": 1e-4} if kind == "WarmupCosineLR" and "cos_min_ratio" not in params else {}
    defaults |= begin if "warmup_min_lr" not in params else {}
    defaults |= {"train.lr": peak} if "warmup_max_lr" not in params and peak is not None else {}
    yield at, Meaning(at, kind, {"train.schedule": shapes[kind], **defaults, **end})
    same = {
        "warmup_max_lr": "train.lr",
        "total_num_steps": "train.steps",
        "warmup_type": "train.warmup_shape",
        "warmup_min_ratio": "train.warmup_from",
        "cos_min_ratio": "train.final_lr",
    }
    for name, value in params.items():
        at = f"scheduler.params.{name}"
        if name == "warmup_min_lr" and begin and value != AUTO:
            yield at, Meaning(at, value, begin)
        elif name == "warmup_num_steps" and value != AUTO:
            yield at, Meaning(at, value, {"train.warmup_steps": max(2, value)})
        else:
            yield at, _plain(at, name, value, same)


def _one_cycle(params: Mapping[str, Any]) -> Named:
    """Up and down again in straight lines: a warm-up and a linear decay, if the run ends with the cycle."""
    low, high = params.get("cycle_min_lr", 0.0), params.get("cycle_max_lr", 0.0)
    first = params.get("cycle_first_step_size", 2000)
    second = params.get("cycle_second_step_size") or first
    share = low / high if high else 0.0
    keys = {"train.schedule": "linear", "train.warmup_shape": "linear", "train.steps": first + second}
    momentum = "" if params.get("cycle_momentum") is False else "momentum does not cycle here: say cycle_momentum false"
    yield "scheduler.type", Meaning("scheduler.type", "OneCycle", keys, refusal=momentum)
    said: dict[str, dict[str, Any]] = {
        "cycle_min_lr": {"train.warmup_from": share, "train.final_lr": share},
        "cycle_max_lr": {"train.lr": high},
        "cycle_first_step_size": {"train.warmup_steps": first},
        "cycle_second_step_size": {},
        "cycle_momentum": {},
    }
    for name, value in params.items():
        at = f"scheduler.params.{name}"
        if name in said:
            yield at, Meaning(at, value, said[name], note="" if said[name] else "scheduler.type says it")
        else:
            why = "" if not value else "the run ends with its cycle, which has no stairs"
            yield at, Meaning(at, value, note="it is 0", refusal=why)


def _fp16(config: Mapping[str, Any]) -> Named:
    said = dict(config.get("fp16") or {})
    enabled = said.pop("enabled", False)
    if "fp16" in config:
        yield "fp16.enabled", Meaning("fp16.enabled", enabled, {"train.precision": "fp16"} if enabled is True else {})
    for name, value in said.items() if enabled else ():
        at = f"fp16.{name}"
        if name == "loss_scale" and value != AUTO:
            yield at, Meaning(at, value, {"train.loss_scale": value or "dynamic"})
        elif name == "initial_scale_power" and value != AUTO:
            yield at, Meaning(at, value, {"train.loss_scale_start": 2.0**value})
        else:
            yield at, _plain(at, name, value, {"loss_scale_window": "train.loss_scale_window"})


def _plain(at: str, name: str, value: Any, same: Mapping[str, str]) -> Meaning:
    """A name that stands for one key, or that need not be said, or that is not known."""
    if name in same:
        return Meaning(at, value, {same[name]: value})
    if name in HARMLESS:
        return Meaning(at, value, note=HARMLESS[name])
    if name in AS_USUAL:
        usual = value in (AUTO, AS_USUAL[name])
        refusal = "" if usual else f"only {str(AS_USUAL[name]).lower()} is offered"
        return Meaning(at, value, note="as usual", refusal=refusal)
    return Meaning(at, value, refusal="Paceline has no such setting")
