"""Train and resume runs: what `paceline.train` and `paceline.resume` call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.config import RunSpec, SpecSource, resolve_spec
from paceline.errors import OutOfMemory, UserError
from paceline.hardware.catalogue import parse_cluster
from paceline.launch.environment import detect_rank
from paceline.planner.advice import suggest_memory_savings
from paceline.planner.plan import apply_plan
from paceline.trainer import run
from paceline.trainer.run import RunResult, build_resumed_spec


def train(
    spec: SpecSource,
    out: str | Path = "runs",
    *,
    resume: str | Path | None = None,
    start: str | Path | None = None,
    again: bool = False,
    changed_code: bool = False,
    show: bool = True,
) -> RunResult:
    """Train a run (a spec, a run file, its content or a Workload class) into a new folder below `out`, or go on with
    the run in `resume`.

    `again`: the folder is `out`/NAME, the same each time. Begin there, go on, or leave it if it is finished.
    `start` is a run, a file or a folder with the weights to begin with, as `model.start` of the spec.
    `changed_code` goes on although the run's own code is not what its last checkpoint was made with.
    `parallel: auto` on a named cluster is the layout that the plan chooses.
    """
    spec = resolve_spec(spec)
    if start is not None:
        spec = spec.replace({"model.start": str(start)})
    place = detect_rank(os.environ)
    chosen = apply_plan(spec, place.world if place is not None else None)
    if chosen is not spec and place is None:
        _check_devices(chosen)
    try:
        return run.train(chosen, out, resume=resume, again=again, changed_code=changed_code, show=show)
    except OutOfMemory as failed:
        if show and (ways := suggest_memory_savings(chosen if place is None else run.fit_to_launcher(chosen, place))):
            first, *rest = str(failed).split("\n")
            failed.args = ("\n".join([first, ways, *rest]),)
        raise


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several."""
    place = detect_rank(os.environ)
    return place is not None and place.world > 1


def _check_devices(spec: RunSpec) -> None:
    """A plan for the devices of a cluster is not carried out on another machine."""
    if spec.parallel.device == "cpu" or parse_cluster(spec.cluster).device.synchronous:
        return
    import torch

    here, wanted = torch.cuda.device_count(), spec.parallel.ranks
    if here < wanted:
        raise UserError(
            f"cluster: {spec.cluster}: the plan takes {wanted} device{'s' * (wanted > 1)}, and this machine has "
            f"{here or 'no'} CUDA device{'s' * (here != 1)}; make launch files for the cluster with  "
            "paceline plan RUN.yaml --emit slurm  or  torchrun, or train here with  cluster=local"
        )


def resume(run: str | Path, overrides: Any = (), *, changed_code: bool = False, show: bool = True) -> RunResult:
    """Go on with a run from its newest whole checkpoint, on the same or another number of ranks.

    `{"train.epochs": "+2"}` goes on beyond its first length.
    """
    return train(build_resumed_spec(run, overrides), resume=run, changed_code=changed_code, show=show)
