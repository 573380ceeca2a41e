"""DeepSpeed and Accelerate wrap the model; loop, data order, events and checkpoints stay Paceline's."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.config import RunSpec
from paceline.errors import RunFailed, reject_value
from paceline.layout import Layout

if TYPE_CHECKING:
    import torch

    from paceline.launch.environment import RankInfo
    from paceline.parallel.parallelize import ModelSetup
    from paceline.trainer.context import RunContext
    from paceline.trainer.step.step import Step

NO_RANK_VARIABLES: dict[str, str | None] = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
"""Unset, so that a library does not look for other ranks."""


def check_engine(spec: RunSpec, layout: Layout, environ: Mapping[str, str]) -> None:
    """Raise UserError for what the engine cannot do, or would do wrongly without notice."""
    engine = spec.parallel.engine
    if engine == "torch":
        return
    if find_spec(engine) is None:
        reason = f"it is not installed; type  pip install 'paceline[{engine}]'"
        raise reject_value("parallel.engine", engine, reason, "not-installed")
    if spec.train.precision == "fp8":
        raise reject_value("train.precision", "fp8", "it is Paceline's own; use bf16, or parallel.engine=torch")
    if engine == "accelerate":
        from paceline.trainer.engines.accelerate_config import check_accelerate

        check_accelerate(spec, layout, environ)
    else:
        from paceline.trainer.engines.deepspeed_config import check_deepspeed

        check_deepspeed(spec, layout)


def start_engine(setup: "ModelSetup", context: "RunContext") -> "Step":
    """Return the step under the engine of a run; its configuration is written to the run folder."""
    if setup.spec.parallel.engine == "deepspeed":
        from paceline.trainer.engines.deepspeed import start_deepspeed

        return start_deepspeed(setup, context)
    from paceline.trainer.engines.accelerate import start_accelerate

    return start_accelerate(setup, context)


def verify_engine(engine: str, facts: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise RunFailed if an engine is not as requested, by facts as (actual, requested)."""
    for what, (actual, requested) in facts.items():
        if actual != requested:
            raise RunFailed(f"{engine} was asked for {what} {requested} and has {actual}: the run was not started")


def build_launch_variables(place: "RankInfo", device: "torch.device") -> dict[str, str | None]:
    """Return torchrun's variables for this rank; LOCAL_RANK is what libraries want: the device."""
    local = str(device.index if device.type == "cuda" else place.local_rank)
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        **({"OMPI_COMM_WORLD_LOCAL_RANK": local} if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ else {}),
    }
