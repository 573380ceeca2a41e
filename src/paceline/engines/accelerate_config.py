"""Accelerate's YAML for a run: made from the run file, or the user's own if it says the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.engines import own_file
from paceline.errors import UserError
from paceline.layout import Layout
from paceline.spec import RunSpec

FILE = "accelerate.yaml"
NOT_HERE = {
    "deepspeed_config": "use parallel.engine=deepspeed, which gives DeepSpeed's JSON itself",
    "megatron_lm_config": "Accelerate spreads data alone here",
    "parallelism_config": "Accelerate spreads data alone here",
    "fp8_config": "train.precision of the run file says it",
    "dynamo_config": "train.compile of the run file says it",
    "tpu_use_cluster": "Paceline runs on CPUs and CUDA devices",
}
LAUNCHED = "ACCELERATE_MIXED_PRECISION"
"""Set by `accelerate launch` in every process it starts."""


def check(spec: RunSpec, layout: Layout, environ: Mapping[str, str]) -> None:
    """Refuse what Accelerate cannot do, or does wrongly without a word."""
    train, parallel = spec.train, spec.parallel
    if layout.strategy not in ("single", "ddp"):
        raise UserError(
            f"parallel.engine=accelerate with parallel.strategy={parallel.strategy}: on CPUs Accelerate drops FSDP "
            "without a word and trains something else, and on CUDA devices Paceline has not proved it; "
            "use parallel.strategy=ddp, or parallel.engine=torch or deepspeed"
        )
    if parallel.offload:
        raise UserError("parallel.offload=true needs sharded parameters; use parallel.engine=torch or deepspeed")
    if train.precision == "fp16":
        raise UserError("train.precision=fp16: Accelerate's loss scale is not Paceline's; use bf16, or engine=torch")
    if LAUNCHED in environ:
        _check_launch(spec, environ)
    config(spec, layout, None if parallel.device == "auto" else parallel.device)


def _check_launch(spec: RunSpec, environ: Mapping[str, str]) -> None:
    """`accelerate launch` says some things of its own through the environment, and some it does not do."""
    if "RANK" not in environ and "OMPI_COMM_WORLD_RANK" not in environ and "PMI_RANK" not in environ:
        if "MASTER_ADDR" in environ:
            raise UserError(
                "accelerate launch was asked for several processes and started one (--cpu --num_processes N does "
                "that); type  paceline train … parallel.ranks=N  or  torchrun --nproc-per-node N -m paceline train …"
            )
        if spec.parallel.ranks > 1:
            n = spec.parallel.ranks
            raise UserError(
                f"parallel.ranks={n}, but accelerate launch started one process; leave accelerate launch out, "
                f"or type  accelerate launch --multi_gpu --num_processes {n} -m paceline train …"
            )
    wanted = _mixed(spec)
    told = {
        LAUNCHED: (("no", wanted), f"--mixed_precision {wanted}"),
        "ACCELERATE_USE_FSDP": (("false",), "no --use_fsdp"),
        "ACCELERATE_USE_DEEPSPEED": (("false",), "no --use_deepspeed"),
        "ACCELERATE_USE_MEGATRON_LM": (("false",), "no --use_megatron_lm"),
        "ACCELERATE_DYNAMO_BACKEND": (("no",), "no --dynamo_backend"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("1",), "no --gradient_accumulation_steps"),
    }
    for name, (allowed, remedy) in told.items():
        if environ.get(name, allowed[0]).lower() not in allowed:
            raise UserError(
                f"accelerate launch says {name}={environ[name]}, but the run file says otherwise; "
                f"start with  accelerate launch  and {remedy}"
            )


def config(spec: RunSpec, layout: Layout, device: str | None) -> dict[str, Any]:
    """What `accelerate config` would have asked for. `device` may not be known yet."""
    many = layout.ranks > 1
    ours: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": ("MULTI_GPU" if device == "cuda" else "MULTI_CPU") if many else "NO",
        "num_processes": layout.ranks,
        "mixed_precision": _mixed(spec),
        "use_cpu": device == "cpu",
    }
    path = spec.parallel.engine_config
    if path is None:
        return {**ours, "num_machines": 1, "machine_rank": 0, "main_training_function": "main", "debug": False}
    theirs = own_file.read(path)
    own_file.refuse(path, theirs, NOT_HERE)
    said: dict[str, tuple[Any, str]] = {
        "num_processes": (layout.ranks, f"parallel.ranks={layout.ranks}"),
        "mixed_precision": (_mixed(spec), f"train.precision={spec.train.precision}"),
        "gradient_accumulation_steps": (1, f"{layout.equation()}, and Paceline accumulates"),
        "gradient_clipping": (spec.train.clip, f"train.clip={spec.train.clip:g}"),
    }
    if device is not None:
        said["use_cpu"] = (ours["use_cpu"], f"parallel.device={spec.parallel.device}, which is {device} here")
    own_file.agree(path, theirs, said)
    kind = theirs.get("distributed_type")
    if kind not in (None, own_file.AUTO, "MULTI_CPU", "MULTI_GPU", *(() if many else ("NO",))):
        raise UserError(
            f"{path}: distributed_type is {kind}, but the run file says parallel.strategy={spec.parallel.strategy} "
            f"on {layout.ranks} rank{'s' * many}; write {ours['distributed_type']}"
        )
    return own_file.laid_over(theirs, ours)


def _mixed(spec: RunSpec) -> str:
    return "bf16" if spec.train.precision == "bf16" else "no"
