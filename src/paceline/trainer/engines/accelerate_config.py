"""Accelerate's YAML for a run: built from the run file, or the user's own if it agrees."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config import RunSpec
from paceline.errors import UserError, reject_value
from paceline.layout import Layout
from paceline.trainer.engines import user_config

ACCELERATE_FILE = "accelerate.yaml"
TABLES = user_config.read_tables("accelerate")
REJECTED: dict[str, str] = TABLES["rejected"]
LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # set by `accelerate launch` in every process it starts
RESHARDS = {"zero2": False, "fsdp": True}
"""FSDP2 strategies, and whether a layer is freed after its forward pass; zero3 is fsdp."""


def is_sharding(layout: Layout) -> bool:
    return layout.strategy in RESHARDS


def check_accelerate(spec: RunSpec, layout: Layout, environ: Mapping[str, str]) -> None:
    """Raise UserError for what Accelerate cannot do, or does wrongly without notice."""
    parallel, others = spec.parallel, "or parallel.engine=torch or deepspeed"
    if layout.strategy not in ("single", "ddp", *RESHARDS):
        reason = f"Accelerate does not have it; use ddp, fsdp or zero2, {others}"
        raise reject_value("parallel.strategy", parallel.strategy, reason)
    device: str | None = parallel.device
    if device == "auto" and is_sharding(layout):
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = None if device == "auto" else device  # torch need not be imported
    if is_sharding(layout) and device == "cpu":
        reason = f"on CPUs Accelerate drops FSDP; use ddp, {others}"
        raise reject_value("parallel.strategy", parallel.strategy, reason)
    if parallel.offload:
        raise reject_value("parallel.offload", "true", f"it does not work with Accelerate; leave it out, {others}")
    if LAUNCHED in environ:
        _check_launch(spec, layout, environ)
    build_accelerate_config(spec, layout, device)


def _check_launch(spec: RunSpec, layout: Layout, environ: Mapping[str, str]) -> None:
    """Raise UserError if the options of `accelerate launch` contradict the run file."""
    alone = not any(name in environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    if alone and (spec.parallel.ranks > 1 or "MASTER_ADDR" in environ):
        lines = "paceline train … parallel.ranks=N  or  torchrun --nproc-per-node N -m paceline train …"
        reason = "started one process for several ranks (--cpu --num_processes N does that)"
        raise UserError(f"accelerate launch {reason}; type  {lines}")
    wanted, reshards = _mixed_precision(spec), str(RESHARDS.get(layout.strategy)).lower()
    allowed_values = {
        LAUNCHED: [["no", wanted], f"--mixed_precision {wanted}"],
        "ACCELERATE_USE_FSDP": [["false", "true"] if is_sharding(layout) else ["false"], "no --use_fsdp"],
        "FSDP_RESHARD_AFTER_FORWARD": [[reshards], f"--fsdp_reshard_after_forward {reshards}"],
        **TABLES["launch"],
    }
    for name, (allowed, remedy) in allowed_values.items():
        if environ.get(name, allowed[0]).lower() not in allowed:
            says = f"accelerate launch says {name}={environ[name]}, but the run file says otherwise"
            raise UserError(f"{says}; start with  accelerate launch  and {remedy}")


def build_accelerate_config(
    spec: RunSpec, layout: Layout, device: str | None, layers: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return what `accelerate config` would write; `device` and the classes `layers` are None while unknown."""
    many = layout.ranks > 1
    ours: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": ("MULTI_GPU" if device == "cuda" else "MULTI_CPU") if many else "NO",
        "num_processes": layout.ranks,
        "mixed_precision": _mixed_precision(spec),
        "use_cpu": device == "cpu",
    }
    sharding = _build_fsdp_section(spec, layout, layers) if is_sharding(layout) else {}
    if sharding:
        ours["distributed_type"] = "FSDP"
        ours["fsdp_config"] = {name: value for name, (value, _) in sharding.items()}
    path = spec.parallel.engine_config
    if path is None:
        return {**ours, "num_machines": 1, "machine_rank": 0, "main_training_function": "main", "debug": False}
    requested: dict[str, tuple[Any, str]] = {
        "num_processes": (layout.ranks, f"parallel.ranks={layout.ranks}"),
        "mixed_precision": (_mixed_precision(spec), f"train.precision={spec.train.precision}"),
        "gradient_accumulation_steps": (1, f"{layout.equation()}, and Paceline accumulates"),
        "gradient_clipping": (spec.train.clip, f"train.clip={spec.train.clip:g}"),
    }
    if device is not None:
        requested["use_cpu"] = (ours["use_cpu"], f"parallel.device={spec.parallel.device}, which is {device} here")
    requested |= {f"fsdp_config.{name}": pair for name, pair in sharding.items()}
    rejected = REJECTED if sharding else REJECTED | {"fsdp_config": f"the run file says {_choose_strategy(spec)}"}
    theirs = user_config.read_user_config(path, rejected, requested)
    kinds = ("FSDP",) if sharding else ("MULTI_CPU", "MULTI_GPU", *(() if many else ("NO",)))
    kind = theirs.get("distributed_type")
    if kind not in (None, user_config.AUTO, *kinds):
        request = f"{_choose_strategy(spec)} on {layout.ranks} rank{'s' * many}; write {ours['distributed_type']}"
        raise UserError(f"{path}: distributed_type is {kind}, but the run file says {request}")
    return user_config.merge_config(theirs, ours)


def _build_fsdp_section(spec: RunSpec, layout: Layout, layers: Sequence[str] | None) -> dict[str, tuple[Any, str]]:
    """Return Accelerate's FSDP section: (value, the setting of the run file that it follows from)."""
    wraps: dict[str, tuple[Any, str]] = {}
    if layers is not None:
        policy = "TRANSFORMER_BASED_WRAP" if layers else "NO_WRAP"
        wraps["fsdp_auto_wrap_policy"] = (policy, f"workload={spec.workload}, whose layers are gathered")
    if layers:
        classes = ",".join(sorted(set(layers)))
        wraps["fsdp_transformer_layer_cls_to_wrap"] = (classes, f"workload={spec.workload}, whose layers these are")
    return {
        "fsdp_version": (2, f"{_choose_strategy(spec)}, which is FSDP2 here"),
        "fsdp_reshard_after_forward": (RESHARDS[layout.strategy], _choose_strategy(spec)),
        **wraps,
        "fsdp_offload_params": (False, "parallel.offload=false"),
        "fsdp_activation_checkpointing": (False, "parallel.activation_checkpointing, and Paceline recomputes"),
        "fsdp_cpu_ram_efficient_loading": (False, f"train.seed={spec.train.seed}, and each rank draws the weights"),
    }


def _choose_strategy(spec: RunSpec) -> str:
    return f"parallel.strategy={spec.parallel.strategy}"


def _mixed_precision(spec: RunSpec) -> str:
    return spec.train.precision if spec.train.precision in ("bf16", "fp16") else "no"
