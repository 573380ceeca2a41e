"""Translate `optimizer`, `scheduler` and `fp16` of DeepSpeed's JSON to keys of a run file.

Defaults of DeepSpeed that differ are translated too: its `AdamW` has no weight decay unless given. The learning rate
follows the same curve; DeepSpeed's warm-up is one step late, since it is looked up after an update.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
SECTIONS = ("optimizer", "scheduler", "fp16")
RULES = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam"), "adamw"),
    **dict.fromkeys(("lamb", "fusedlamb"), "lamb"),
    "sgd": "sgd",
}
"""DeepSpeed's optimisers that Paceline has; its Adam is AdamW unless `adam_w_mode` is false."""
SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine", "OneCycle": "linear"}
BETAS, DECAY = ("train.beta1", "train.beta2"), ("train.weight_decay", "train.decay")
SAME = {"lr": "train.lr", "eps": "train.eps", "momentum": "train.momentum", "nesterov": "train.nesterov"}
SAME_SCHEDULE = {
    "warmup_max_lr": "train.lr",
    "total_num_steps": "train.steps",
    "warmup_type": "train.warmup_shape",
    "warmup_min_ratio": "train.warmup_from",
    "cos_min_ratio": "train.final_lr",
}
WHOLE = frozenset(
    (
        *("warmup_num_steps", "total_num_steps", "cycle_first_step_size", "cycle_second_step_size"),
        *("initial_scale_power", "loss_scale_window"),
    )
)
NUMBERS = WHOLE | {
    *("lr", "eps", "weight_decay", "momentum", "warmup_min_lr", "warmup_max_lr", "warmup_min_ratio"),
    *("cos_min_ratio", "cycle_min_lr", "cycle_max_lr", "loss_scale"),
}
MAY_BE_NULL = (".warmup_max_lr", ".cycle_second_step_size")
"""Numbers that DeepSpeed derives if they are null."""
LARGEST_POWER = 100
"""Largest power of two of a loss scale: fp32 ends at 127, which leaves room for the loss."""
HARMLESS = {
    **dict.fromkeys(("torch_adam", "fused", "foreach"), "which kernel does the update is Paceline's choice"),
    "adam_w_mode": "train.optimizer says it",
    "last_batch_iteration": "the schedule follows the position of the run",
    "min_loss_scale": "a dynamic loss scale has no floor",
    "auto_cast": "products are in fp16 whatever comes in",
}
"""Names that need no key, and why."""
FIRST = "the loss scale halves at the first overflow"
OTHERWISE = {"hysteresis": (1, FIRST), "consecutive_hysteresis": (False, FIRST), "min_loss_scale": (1, "")}
"""Names that Paceline handles differently, with the value that it agrees with."""
AS_USUAL = {"bias_correction": True, "amsgrad": False, "dampening": 0, "fp16_master_weights_and_grads": False}
"""Names that may have only this value."""


@dataclass(frozen=True)
class Meaning:
    """One name of the JSON, translated."""

    name: str
    value: Any
    keys: dict[str, Any] = field(default_factory=dict)
    """Equivalent keys of a run file."""
    note: str = ""
    """Why no key is needed."""
    refusal: str = ""
    """Why it is not supported."""
    given: bool = True
    """False for a default of DeepSpeed."""
    own_way: bool = False
    """Handled differently, as the note says; accepted."""


def translate_sections(config: Mapping[str, Any]) -> list[Meaning]:
    """Translate every name of the three sections, except those that are `auto`.

    Raise ValueError if a value is not of the type that DeepSpeed takes.
    """
    rate = list(_translate_scheduler(config))
    own_lr = next((one.keys["train.lr"] for one in rate if "train.lr" in one.keys), None)
    found = [*_translate_optimizer(config, own_lr), *rate, *_translate_fp16(config)]
    return [one for one in found if one.value != AUTO]


def _read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    said = config.get(name)
    if said is not None and not isinstance(said, Mapping):
        raise ValueError(f"{name}: {json.dumps(said)} is not a section with names of its own")
    return dict(said or {})


def _read_params(config: Mapping[str, Any], section: str) -> tuple[str, dict[str, Any]]:
    """Return (type, parameters) of the optimiser or the scheduler."""
    said = _read_section(config, section)
    return str(said.get("type", AUTO)), _parse_numbers(f"{section}.params", _read_section(said, "params"))


def _parse_numbers(above: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _parse_number(f"{above}.{name}", value) if name in NUMBERS else value for name, value in values.items()
    }


def _parse_number(name: str, value: Any) -> Any:
    if value == AUTO or (value is None and name.endswith(MAY_BE_NULL)):
        return value
    try:
        found = math.nan if isinstance(value, bool) else value if isinstance(value, int | float) else float(value)
        known = math.isfinite(found)
    except (TypeError, ValueError, OverflowError):
        known = False
    if not known:
        raise ValueError(f"{name}: {value!r:.40} is not a number")
    if name.rsplit(".", 1)[-1] not in WHOLE:
        return found
    if found != int(found):
        raise ValueError(f"{name}: {value!r} is not a whole number")
    return int(found)


def _translate_optimizer(config: Mapping[str, Any], lr_from_scheduler: Any) -> Iterator[Meaning]:
    kind, params = _read_params(config, "optimizer")
    if not config.get("optimizer"):
        return
    rule = RULES.get(kind.lower(), "")
    if rule == "adamw" and kind.lower() != "adamw" and params.get("adam_w_mode") is False:
        rule = "adam"
    at = "optimizer.type"
    if kind != AUTO and not rule:
        yield Meaning(at, kind, refusal="train.optimizer is adamw, adam, sgd, lars or lamb")
    else:
        yield Meaning(at, kind, {"train.optimizer": rule})
    absent = {"weight_decay": 0.0} | ({"momentum": 0.0} if rule == "sgd" else {})
    for name, value in absent.items() if kind != AUTO else ():
        if name not in params:
            yield Meaning(f"optimizer.params.{name}", value, {f"train.{name}": value}, given=False)
    for name, value in params.items():
        at = f"optimizer.params.{name}"
        if name == "lr" and lr_from_scheduler is not None:
            yield Meaning(at, value, note="the scheduler decides", own_way=value != lr_from_scheduler)
        elif name == "betas" and value != AUTO:
            if not isinstance(value, list | tuple) or len(value) != 2:
                raise ValueError(f"{at}: {value!r} is not a pair such as [0.9, 0.999]")
            yield Meaning(at, value, {key: _parse_number(at, beta) for key, beta in zip(BETAS, value, strict=True)})
        elif name == "weight_decay" and value != AUTO:
            yield Meaning(at, value, dict(zip(DECAY, (value, "all"), strict=True)) if value else {DECAY[0]: 0.0})
        else:
            yield _translate_name(at, name, value, SAME)


def _translate_scheduler(config: Mapping[str, Any]) -> Iterator[Meaning]:
    kind, params = _read_params(config, "scheduler")
    if not config.get("scheduler"):
        return
    at = "scheduler.type"
    if kind == AUTO or kind not in SHAPES:
        yield Meaning(at, kind, refusal="" if kind == AUTO else f"supported are {', '.join(SHAPES)}")
        for name, value in params.items():
            refusal = "" if kind == AUTO else f"it belongs to {kind}, which is not supported"
            yield Meaning(f"scheduler.params.{name}", value, note="scheduler.type says it", refusal=refusal)
        return
    yield Meaning(at, kind, {"train.schedule": SHAPES[kind]})
    if kind == "OneCycle":
        yield from _translate_one_cycle(params)
        return
    said = {**_default_params(kind), **params}
    begin = _derive_lowest_lr(config, kind, said)
    for name, value in said.items():
        at, given = f"scheduler.params.{name}", name in params
        if name == "warmup_min_lr" and kind != "WarmupCosineLR":
            yield Meaning(at, value, {} if value == AUTO else begin, given=given)
        elif name == "warmup_num_steps" and value != AUTO:
            yield Meaning(at, value, {"train.warmup_steps": max(2, value)}, given=given)
        elif given:
            yield _translate_name(at, name, value, SAME_SCHEDULE)
        else:
            yield Meaning(at, value, {SAME_SCHEDULE[name]: value}, given=False)


def _default_params(kind: str) -> dict[str, Any]:
    """Return DeepSpeed's defaults of a scheduler."""
    both = {"warmup_num_steps": 1000, "warmup_type": "log"}
    if kind == "WarmupCosineLR":
        return {**both, "cos_min_ratio": 1e-4}
    return {**both, "warmup_min_lr": 0.0} | ({"warmup_max_lr": 0.001} if kind == "WarmupDecayLR" else {})


def _derive_lowest_lr(config: Mapping[str, Any], kind: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lowest rate of warm-up and decay, as a fraction of the peak."""
    peak, low = said.get("warmup_max_lr"), said.get("warmup_min_lr", 0.0)
    if peak is None:
        peak = _read_params(config, "optimizer")[1].get("lr")
    if low and low != AUTO and not isinstance(peak, int | float):
        raise ValueError(f"scheduler.params.warmup_min_lr: {low} needs warmup_max_lr beside it")
    share = low / peak if low and low != AUTO else 0.0
    return {"train.warmup_from": share} | ({"train.final_lr": share} if kind == "WarmupDecayLR" else {})


def _translate_one_cycle(params: Mapping[str, Any]) -> Iterator[Meaning]:
    """Translate OneCycle to a warm-up and a linear decay, if the run ends with the cycle."""
    low, high = params.get("cycle_min_lr") or 0.0, params.get("cycle_max_lr") or 0.0
    first = params.get("cycle_first_step_size") or 2000
    second = params.get("cycle_second_step_size") or first
    if AUTO in (low, high, first, second):
        raise ValueError("scheduler.params: a OneCycle has its rates and sizes as numbers, not auto")
    share = low / high if high else 0.0
    said: dict[str, dict[str, Any]] = {
        "cycle_min_lr": {"train.warmup_from": share, "train.final_lr": share},
        "cycle_max_lr": {"train.lr": high},
        "cycle_first_step_size": {"train.warmup_steps": first, "train.warmup_shape": "linear"},
        "cycle_second_step_size": {"train.steps": first + second},
    }
    for name in [name for name in said if high and name not in params]:
        yield Meaning(f"scheduler.params.{name}", first if "size" in name else 0.0, said[name], given=False)
    cycles = params.get("cycle_momentum", True)
    refusal = "momentum does not cycle here: say cycle_momentum false" if cycles else ""
    yield Meaning("scheduler.params.cycle_momentum", cycles, {}, "it stays", refusal, "cycle_momentum" in params)
    for name, value in params.items():
        at = f"scheduler.params.{name}"
        if name in said:
            yield Meaning(at, value, said[name])
        elif name != "cycle_momentum":
            why = "" if not value else "the run ends with its cycle, which has no stairs"
            yield Meaning(at, value, note="it is 0", refusal=why)


def _translate_fp16(config: Mapping[str, Any]) -> Iterator[Meaning]:
    said = _parse_numbers("fp16", _read_section(config, "fp16"))
    enabled = said.pop("enabled", False)
    if enabled not in (True, False, None, AUTO):
        raise ValueError(f"fp16.enabled: {enabled!r} is not true or false")
    if "fp16" in config:
        keys = {"train.precision": "fp16"} if enabled is True else {}
        yield Meaning("fp16.enabled", enabled, keys, note="" if keys else "off")
    for name, value in said.items():
        at = f"fp16.{name}"
        if not enabled:
            yield Meaning(at, value, note="fp16 is off")
        elif name == "loss_scale" and value != AUTO:
            yield Meaning(at, value, {"train.loss_scale": value or "dynamic"})
        elif name == "initial_scale_power" and value != AUTO:
            if not -LARGEST_POWER <= value <= LARGEST_POWER:
                raise ValueError(f"{at}: 2 to the power of {value} is no loss scale")
            yield Meaning(at, value, {"train.loss_scale_start": 2.0**value})
        else:
            yield _translate_name(at, name, value, {"loss_scale_window": "train.loss_scale_window"})


def _translate_name(at: str, name: str, value: Any, same: Mapping[str, str]) -> Meaning:
    """Translate a name that is one key, needs none, or is unknown."""
    if name in same:
        return Meaning(at, value, {} if value is None else {same[name]: value}, note="not set" if value is None else "")
    if name in OTHERWISE:
        usual, why = OTHERWISE[name]
        return Meaning(at, value, note=why or HARMLESS[name], own_way=value not in (AUTO, usual))
    if name in HARMLESS:
        return Meaning(at, value, note=HARMLESS[name])
    if name in AS_USUAL:
        usual = value in (AUTO, AS_USUAL[name])
        refusal = "" if usual else f"only {str(AS_USUAL[name]).lower()} is supported"
        return Meaning(at, value, note="as usual", refusal=refusal)
    return Meaning(at, value, refusal="Paceline has no such setting")
