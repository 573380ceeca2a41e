"""DeepSpeed's JSON for a run: built from the run file, over the user's own file if there is one."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.errors import UserError, reject_value
from paceline.layout import Layout
from paceline.trainer.engines import user_config
from paceline.trainer.engines.user_config import AUTO

DEEPSPEED_FILE = "deepspeed.json"
STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""The ZeRO stage of each strategy; zero3 is another name of fsdp."""
SECTIONS = ("optimizer", "scheduler", "fp16")
TABLES = user_config.read_tables("deepspeed")
NUMBERS = {*TABLES["integers"], *TABLES["floats"]}
LARGEST_POWER = 100  # of two, in a loss scale: fp32 ends at 127


def check_deepspeed(spec: RunSpec, layout: Layout) -> None:
    """Raise UserError for what DeepSpeed cannot do, or does wrongly without notice."""
    train, parallel = spec.train, spec.parallel
    whole = "looks at single layers, and ZeRO hands it flat parts of many; use adamw, adam or sgd"
    for key, value, supported, reason in (
        ("train.ema", train.ema, train.ema is None, "DeepSpeed does not have it"),
        ("train.clip_value", train.clip_value, not train.clip_value, "DeepSpeed does not have it"),
        ("parallel.strategy", layout.strategy, layout.strategy in STAGES, "use ddp (ZeRO 0), zero1, zero2 or zero3"),
        ("train.optimizer", train.optimizer, train.optimizer in ("adamw", "adam", "sgd"), whole),
        ("train.precision", train.precision, train.precision != "fp64", "DeepSpeed has no fp64; use fp32"),
        ("parallel.offload", "true", not parallel.offload or STAGES.get(layout.strategy), "ZeRO 0 would ignore it"),
    ):
        if not supported:
            raise reject_value(key, value, f"{reason}; or use parallel.engine=torch")
    if parallel.engine_config is not None:
        _read_user_json(spec, layout, parallel.engine_config)


def build_deepspeed_config(spec: RunSpec, layout: Layout, pinned: bool, largest_vector: int) -> dict[str, Any]:
    """Return the JSON as a dict; `pinned` uses pinned host memory.

    `largest_vector`: with ZeRO 3, biases and norms up to this size stay whole and matrices are sharded. DeepSpeed's own
    limit of 100,000 elements would leave a small model unsharded.
    """
    stage = STAGES[layout.strategy]
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero["reduce_bucket_size"] = max(1, int(spec.parallel.bucket_mb * 1e6 / 4))
    if spec.parallel.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = largest_vector
        if spec.parallel.offload:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    defaults: dict[str, Any] = {"steps_per_print": None, "zero_optimization": zero}
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.passes(layout.global_batch),
        "gradient_clipping": 0.0,  # Paceline clips; DeepSpeed's default would clip at 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # it works on flat parts too
        "zero_force_ds_cpu_optimizer": False,
    }
    theirs = {}
    if spec.parallel.engine_config is not None:
        theirs = _read_user_json(spec, layout, spec.parallel.engine_config)
        theirs.pop("train_batch_size", None)  # their product, which need not divide evenly
    if spec.train.precision == "bf16" and not user_config.get_nested(theirs, "bf16.enabled"):
        ours["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return user_config.merge_config(user_config.merge_config(defaults, theirs), ours)


def _read_user_json(spec: RunSpec, layout: Layout, path: Path) -> dict[str, Any]:
    """Read the user's own JSON; raise UserError if it contradicts the run file."""
    train, parallel, stage = spec.train, spec.parallel, STAGES[layout.strategy]
    offload, where = f"parallel.offload={str(parallel.offload).lower()}", "cpu" if parallel.offload else "none"
    strategy, precision = f"parallel.strategy={parallel.strategy}", f"train.precision={train.precision}"
    ours: dict[str, tuple[Any, str]] = {
        "train_batch_size": (train.global_batch, f"train.global_batch={train.global_batch}"),
        "train_micro_batch_size_per_gpu": (layout.micro_batch, f"parallel.micro_batch={layout.micro_batch}"),
        "gradient_accumulation_steps": (layout.passes(layout.global_batch), layout.equation()),
        "gradient_clipping": (train.clip, f"train.clip={train.clip:g}"),
        "managed_gradient_accumulation": (True, "when a step ends"),
        "zero_optimization.stage": (stage, strategy),
        "zero_optimization.compute_grad_norm": (True, f"train.clip={train.clip:g}"),
        "zero_optimization.offload_optimizer.device": (where, offload),
        "zero_optimization.offload_param.device": (where if stage == 3 else "none", f"{offload} and {strategy}"),
        "fp16.enabled": (train.precision == "fp16", precision),
    }
    if train.precision != "bf16":
        ours |= {"bf16.enabled": (False, precision), "torch_autocast.enabled": (False, precision)}
    theirs = user_config.read_user_config(path, TABLES["rejected"], ours)
    _check_same_meaning(spec, path, theirs)
    for name in SECTIONS:  # done by Paceline
        theirs.pop(name, None)
    if user_config.get_nested(theirs, "bf16.enabled") is True and stage == 0:
        advice = "use parallel.strategy=zero1, or remove bf16, for autocast over fp32 weights"
        raise UserError(f"{path}: bf16.enabled with ZeRO 0 gives wrong numbers in DeepSpeed; {advice}")
    return theirs


def _check_same_meaning(spec: RunSpec, path: Path, theirs: dict[str, Any]) -> None:
    """Raise UserError if optimiser, schedule or loss scale differ from the run file."""
    try:
        meanings = translate_sections(theirs)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    ours, names, values = {}, {}, {}
    for meaning in meanings:
        if meaning.refusal:
            end = "; remove it from that file" if meaning.given else ""
            raise UserError(f"{path}: {meaning.name} is {json.dumps(meaning.value)}: {meaning.refusal}{end}")
        for key, value in meaning.keys.items():
            names[key], values[key] = meaning.name + ", not given" * (not meaning.given), value
            ours[key] = getattr(spec.train, key.removeprefix("train."))
    if different := [key for key in names if not _is_same(ours[key], values[key], key)]:
        words = ", ".join(f"{names[key]} ({key}={_format_typed(ours[key])})" for key in different)
        line = " ".join(f"{key}={_format_typed(values[key])}" for key in different)
        raise UserError(f"{path} and the run file differ: {words}; remove it from that file, or type  {line}")


def _is_same(ours: Any, theirs: Any, key: str) -> bool:
    if key == "train.eps" and ours is None:
        ours = 1e-8
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-12)
    return bool(ours == theirs)


def _format_typed(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


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
    """Translate `optimizer`, `scheduler` and `fp16`; raise ValueError for a value of a wrong type."""
    schedule = list(_translate_scheduler(config))
    lr = next((lr for meaning in schedule if (lr := meaning.keys.get("train.lr", AUTO)) != AUTO), None)
    meanings = [*_translate_optimizer(config, lr), *schedule, *_translate_fp16(config)]
    return [meaning for meaning in meanings if meaning.value != AUTO]


def _read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(f"{name}: {json.dumps(section)} is not a section (a JSON object)")
    return dict(section or {})


def _read_params(config: Mapping[str, Any], section: str) -> tuple[str, dict[str, Any]]:
    """Return (type, parameters) of the optimiser or the scheduler."""
    values = _read_section(config, section)
    return str(values.get("type", AUTO)), _parse_numbers(f"{section}.params", _read_section(values, "params"))


def _parse_numbers(at: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _parse_number(f"{at}.{name}", v) if name in NUMBERS else v for name, v in values.items()}


def _parse_number(name: str, value: Any) -> Any:
    if value == AUTO or (value is None and name.endswith(".warmup_max_lr")):
        return value
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
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
        yield Meaning(at, kind, refusal="train.optimizer is adamw, adam, sgd, lars, lamb or muon")
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
    values = {**TABLES["scheduler_defaults"][kind], **params}
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


def _derive_lowest_lr(config: Mapping[str, Any], kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lowest rate of warm-up and decay, as a fraction of the peak."""
    peak, low = params.get("warmup_max_lr"), params.get("warmup_min_lr", 0.0)
    if peak is None:
        peak = _read_params(config, "optimizer")[1].get("lr")
    if low and low != AUTO and not isinstance(peak, int | float):
        raise ValueError(f"scheduler.params.warmup_min_lr: {low} needs warmup_max_lr beside it")
    share = low / peak if low and low != AUTO else 0.0
    return {"train.warmup_from": share} | ({"train.final_lr": share} if kind == "WarmupDecayLR" else {})


def _translate_fp16(config: Mapping[str, Any]) -> Iterator[Meaning]:
    values = _parse_numbers("fp16", _read_section(config, "fp16"))
    enabled = values.pop("enabled", False)
    enabled = {"true": True, "false": False}.get(str(enabled).lower(), enabled)  # as DeepSpeed reads it
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
