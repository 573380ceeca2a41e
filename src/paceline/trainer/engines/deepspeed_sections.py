"""Translate `optimizer`, `scheduler` and `fp16` of DeepSpeed's JSON to keys of a run file.

Defaults of DeepSpeed that differ are translated too: its `AdamW` has no weight decay unless given. The learning rate
follows the same curve; DeepSpeed's warm-up is one step late, since it is looked up after an update.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.trainer.engines.user_config import read_tables

AUTO = "auto"
SECTIONS = ("optimizer", "scheduler", "fp16")
TABLES = read_tables("deepspeed")
NUMBERS = {*TABLES["integers"], *TABLES["floats"]}
MAY_BE_NULL = (".warmup_max_lr", ".cycle_second_step_size")  # numbers that DeepSpeed derives if they are null
LARGEST_POWER = 100  # largest power of two of a loss scale: fp32 ends at 127, which leaves room for the loss


@dataclass(frozen=True)
class Meaning:
    """One name of the JSON, translated."""

    name: str
    value: Any
    keys: dict[str, Any] = field(default_factory=dict)  # equivalent keys of a run file
    note: str = ""  # why no key is needed
    refusal: str = ""  # why it is not supported
    given: bool = True  # false for a default of DeepSpeed
    own_way: bool = False  # handled differently, as the note says; accepted


def translate_sections(config: Mapping[str, Any]) -> list[Meaning]:
    """Translate every name of the three sections, except those that are `auto`.

    Raise ValueError if a value is not of the type that DeepSpeed takes.
    """
    schedule = list(_translate_scheduler(config))
    lr = next((meaning.keys["train.lr"] for meaning in schedule if "train.lr" in meaning.keys), None)
    meanings = [*_translate_optimizer(config, lr), *schedule, *_translate_fp16(config)]
    return [meaning for meaning in meanings if meaning.value != AUTO]


def _read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(f"{name}: {json.dumps(section)} is not a section with names of its own")
    return dict(section or {})


def _read_params(config: Mapping[str, Any], section: str) -> tuple[str, dict[str, Any]]:
    """Return (type, parameters) of the optimiser or the scheduler."""
    values = _read_section(config, section)
    return str(values.get("type", AUTO)), _parse_numbers(f"{section}.params", _read_section(values, "params"))


def _parse_numbers(at: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _parse_number(f"{at}.{name}", v) if name in NUMBERS else v for name, v in values.items()}


def _parse_number(name: str, value: Any) -> Any:
    if value == AUTO or (value is None and name.endswith(MAY_BE_NULL)):
        return value
    try:
        number = math.nan if isinstance(value, bool) else value if isinstance(value, int | float) else float(value)
        finite = math.isfinite(number)
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise ValueError(f"{name}: {value!r:.40} is not a number")
    if name.rsplit(".", 1)[-1] not in TABLES["integers"]:
        return number
    if number != int(number):
        raise ValueError(f"{name}: {value!r} is not a whole number")
    return int(number)


def _translate_optimizer(config: Mapping[str, Any], lr_from_scheduler: Any) -> Iterator[Meaning]:
    kind, params = _read_params(config, "optimizer")
    if not config.get("optimizer"):
        return
    rule = TABLES["optimizers"].get(kind.lower(), "")
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
            yield Meaning(at, value, {f"train.beta{i}": _parse_number(at, beta) for i, beta in enumerate(value, 1)})
        elif name == "weight_decay" and value != AUTO:
            keys = {"train.weight_decay": value, "train.decay": "all"} if value else {"train.weight_decay": 0.0}
            yield Meaning(at, value, keys)
        else:
            yield _translate_name(at, name, value, TABLES["optimizer_keys"])


def _translate_scheduler(config: Mapping[str, Any]) -> Iterator[Meaning]:
    kind, params = _read_params(config, "scheduler")
    if not config.get("scheduler"):
        return
    at, shapes = "scheduler.type", TABLES["schedules"]
    if kind == AUTO or kind not in shapes:
        yield Meaning(at, kind, refusal="" if kind == AUTO else f"supported are {', '.join(shapes)}")
        for name, value in params.items():
            refusal = "" if kind == AUTO else f"it belongs to {kind}, which is not supported"
            yield Meaning(f"scheduler.params.{name}", value, note="scheduler.type says it", refusal=refusal)
        return
    yield Meaning(at, kind, {"train.schedule": shapes[kind]})
    if kind == "OneCycle":
        yield from _translate_one_cycle(params)
        return
    values = {**_default_params(kind), **params}
    begin = _derive_lowest_lr(config, kind, values)
    for name, value in values.items():
        at, given = f"scheduler.params.{name}", name in params
        if name == "warmup_min_lr" and kind != "WarmupCosineLR":
            yield Meaning(at, value, {} if value == AUTO else begin, given=given)
        elif name == "warmup_num_steps" and value != AUTO:
            yield Meaning(at, value, {"train.warmup_steps": max(2, value)}, given=given)
        elif given:
            yield _translate_name(at, name, value, TABLES["scheduler_keys"])
        else:
            yield Meaning(at, value, {TABLES["scheduler_keys"][name]: value}, given=False)


def _default_params(kind: str) -> dict[str, Any]:
    """Return DeepSpeed's defaults of a scheduler."""
    both = {"warmup_num_steps": 1000, "warmup_type": "log"}
    if kind == "WarmupCosineLR":
        return {**both, "cos_min_ratio": 1e-4}
    return {**both, "warmup_min_lr": 0.0} | ({"warmup_max_lr": 0.001} if kind == "WarmupDecayLR" else {})


def _derive_lowest_lr(config: Mapping[str, Any], kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lowest rate of warm-up and decay, as a fraction of the peak."""
    peak, low = params.get("warmup_max_lr"), params.get("warmup_min_lr", 0.0)
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
    keys: dict[str, dict[str, Any]] = {
        "cycle_min_lr": {"train.warmup_from": share, "train.final_lr": share},
        "cycle_max_lr": {"train.lr": high},
        "cycle_first_step_size": {"train.warmup_steps": first, "train.warmup_shape": "linear"},
        "cycle_second_step_size": {"train.steps": first + second},
    }
    for name in [name for name in keys if high and name not in params]:
        yield Meaning(f"scheduler.params.{name}", first if "size" in name else 0.0, keys[name], given=False)
    cycles = params.get("cycle_momentum", True)
    refusal = "momentum does not cycle here: say cycle_momentum false" if cycles else ""
    yield Meaning("scheduler.params.cycle_momentum", cycles, {}, "it stays", refusal, "cycle_momentum" in params)
    for name, value in params.items():
        at = f"scheduler.params.{name}"
        if name in keys:
            yield Meaning(at, value, keys[name])
        elif name != "cycle_momentum":
            why = "" if not value else "the run ends with its cycle, which has no stairs"
            yield Meaning(at, value, note="it is 0", refusal=why)


def _translate_fp16(config: Mapping[str, Any]) -> Iterator[Meaning]:
    values = _parse_numbers("fp16", _read_section(config, "fp16"))
    enabled = values.pop("enabled", False)
    if enabled not in (True, False, None, AUTO):
        raise ValueError(f"fp16.enabled: {enabled!r} is not true or false")
    if "fp16" in config:
        keys = {"train.precision": "fp16"} if enabled is True else {}
        yield Meaning("fp16.enabled", enabled, keys, note="" if keys else "off")
    for name, value in values.items():
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


def _translate_name(at: str, name: str, value: Any, keys: Mapping[str, str]) -> Meaning:
    """Translate a name that is one key, needs none, or is unknown."""
    if name in keys:
        return Meaning(at, value, {} if value is None else {keys[name]: value}, note="not set" if value is None else "")
    if name in TABLES["handled_differently"]:
        usual, why = TABLES["handled_differently"][name]
        return Meaning(at, value, note=why, own_way=value not in (AUTO, usual))
    if name in TABLES["harmless"]:
        return Meaning(at, value, note=TABLES["harmless"][name])
    if name in TABLES["fixed"]:
        usual = TABLES["fixed"][name]
        refusal = "" if value in (AUTO, usual) else f"only {str(usual).lower()} is supported"
        return Meaning(at, value, note="as usual", refusal=refusal)
    return Meaning(at, value, refusal="Paceline has no such setting")
