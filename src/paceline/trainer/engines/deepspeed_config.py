"""DeepSpeed's JSON for a run: built from the run file, over the user's own file if there is one."""

import json
import math
from pathlib import Path
from typing import Any

from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.layout import Layout
from paceline.trainer.engines import deepspeed_sections, user_config

DEEPSPEED_FILE = "deepspeed.json"
STAGES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""The ZeRO stage of each strategy; zero3 is another name of fsdp."""


def check_deepspeed(spec: RunSpec, layout: Layout) -> None:
    """Raise UserError for what DeepSpeed cannot do, or does wrongly without notice."""
    train, parallel = spec.train, spec.parallel
    for key, off in (("ema", None), ("clip_value", 0.0)):
        if (value := getattr(train, key)) != off:
            raise UserError(f"train.{key}={value} is not supported with DeepSpeed; use parallel.engine=torch")
    if layout.strategy not in STAGES:
        unknown = f"does not know parallel.strategy={layout.strategy}"
        raise UserError(f"parallel.engine=deepspeed {unknown}; use ddp (ZeRO 0), zero1, zero2 or zero3")
    if train.optimizer not in ("adamw", "adam", "sgd"):
        reason = f"train.optimizer={train.optimizer} looks at single layers, and ZeRO hands it flat parts of many"
        raise UserError(f"{reason}; use adamw, adam or sgd, or parallel.engine=torch")
    if train.precision == "fp64":
        raise UserError("train.precision=fp64: DeepSpeed has no fp64; use fp32, or parallel.engine=torch")
    if parallel.offload and STAGES[layout.strategy] == 0:
        raise UserError("parallel.offload=true: ZeRO 0 would ignore it; use parallel.strategy=zero1, zero2 or zero3")
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
        "zero_allow_untested_optimizer": True,  # Paceline's own, which works on flat parts as on anything
        "zero_force_ds_cpu_optimizer": False,
    }
    theirs = {}
    if spec.parallel.engine_config is not None:
        theirs = _read_user_json(spec, layout, spec.parallel.engine_config)
        theirs.pop("train_batch_size", None)  # DeepSpeed's product of the three, which need not divide evenly
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
    theirs = user_config.read_user_config(path, deepspeed_sections.TABLES["rejected"], ours)
    _check_same_meaning(spec, path, theirs)
    for name in deepspeed_sections.SECTIONS:  # done by Paceline
        theirs.pop(name, None)
    if user_config.get_nested(theirs, "bf16.enabled") is True and stage == 0:
        advice = "use parallel.strategy=zero1, or remove bf16, for autocast over fp32 weights"
        raise UserError(f"{path}: bf16.enabled with ZeRO 0 gives wrong numbers in DeepSpeed; {advice}")
    return theirs


def _check_same_meaning(spec: RunSpec, path: Path, theirs: dict[str, Any]) -> None:
    """Raise UserError if optimiser, schedule or loss scale differ from the run file."""
    try:
        meanings = deepspeed_sections.translate_sections(theirs)
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
