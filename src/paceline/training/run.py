"""The verb `train`: from a spec to a finished run folder, on one rank or many.

The process that was asked checks the request and prepares the data; ranks then meet, build the same job and enter the
loop. Under torchrun, srun or mpirun the ranks are there already, and each of them was asked.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, RunFailed, UserError
from paceline.launch.environment import Place, detect
from paceline.layout import Layout, layout_of
from paceline.record.files import write_json
from paceline.record.run_dir import RunDir
from paceline.spec import DEFAULT, RunSpec
from paceline.workload import Workload, workload_of

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.loop import Job

MAY_CHANGE = ("name", "parallel.", "train.keep", "train.log_every", "train.loggers", "data.path", "data.cache")
"""What a resumed run may be given anew: nothing that would change its answer."""


@dataclass(frozen=True)
class RunResult:
    """A run that ended: its folder and its summary."""

    path: Path
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.summary["metrics"])

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors, from the newest checkpoint."""
        from paceline.training.checkpoint import newest, read_tensors

        checkpoint = newest(RunDir(self.path).checkpoints, _say)
        if checkpoint is None:
            raise UserError(f"{self.path} has no whole checkpoint")
        return read_tensors(checkpoint)


def train(spec: RunSpec, out: str | Path = "runs", *, resume: str | Path | None = None, show: bool = True) -> RunResult:
    """Train a spec into a new folder below `out`, or go on with the run in `resume`."""
    place = detect(os.environ)
    if place is not None:
        spec = _as_placed(spec, place)
        return _result(_rank(spec, str(out), str(resume) if resume else None, show))
    layout = layout_of(spec)
    check_request(spec, layout, _say if show else _silent)
    run = _open_run(spec, Path(out), resume)
    arguments = (spec, str(out), str(run.path), show)
    if layout.ranks == 1:
        return _result(_rank(*arguments))
    from paceline.launch.local import run_ranks

    return _result(run_ranks(_rank, arguments, layout.ranks)[0])


def resume(run: str | Path, overrides: Any = (), *, show: bool = True) -> RunResult:
    """Go on with a run from its newest whole checkpoint, on the same or another number of ranks."""
    return train(resumed_spec(run, overrides), resume=run, show=show)


def resumed_spec(run: str | Path, overrides: Any = ()) -> RunSpec:
    """The spec of a run with new values for what may change."""
    from paceline.spec import COMMAND_LINE, build, load

    folder = RunDir.open(Path(run))
    old = folder.spec()
    changed = load(folder.spec_file, overrides)
    for key in (k for k in _keys(changed) if changed.origin(k) != COMMAND_LINE):
        changed._origins[key] = old.origin(key)
    _same_answer(folder, changed)
    return build(changed.dump(), changed._origins)


def check_request(spec: RunSpec, layout: Layout, say: Callable[[str], None]) -> Workload:
    """All that can be known to be wrong before a rank starts."""
    from paceline.record.loggers import check_loggers

    if spec.parallel.device == "cuda":
        import torch

        if torch.cuda.device_count() < layout.ranks:
            raise UserError(
                f"parallel.device=cuda needs {layout.ranks} CUDA devices and there are {torch.cuda.device_count()}; "
                "use parallel.device=cpu or fewer parallel.ranks"
            )
    check_loggers(spec.train.loggers)
    workload = workload_of(spec)
    workload.prepare(say)
    return workload


def _rank(spec: RunSpec, out: str, folder: str | None, show: bool) -> dict[str, Any]:
    """One rank's life; returns the summary. The main rank alone speaks and writes the summary."""
    import torch
    import torch.distributed as dist

    from paceline.launch.group import joined

    place = detect(os.environ) or Place(0, 1, 0, 1, "alone", "localhost", 0)
    device_kind = spec.parallel.device
    if device_kind == "auto":
        device_kind = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world else "cpu"
    say = _say if show and place.rank == 0 else _silent
    with joined(place, device_kind, spec.parallel.threads, spec.parallel.timeout_s) as device:
        if place.launcher in ("torchrun", "srun", "mpirun"):
            box = [_asked_here(spec, out, folder, say) if place.rank == 0 else None]
            if place.world > 1:
                dist.broadcast_object_list(box)
            if isinstance(box[0], PacelineError):
                raise box[0]
            folder = box[0]
        assert folder is not None
        with ExitStack() as stack:
            return _train_in(RunDir(Path(folder)), spec, place, device, say, show, stack)


def _asked_here(spec: RunSpec, out: str, folder: str | None, say: Callable[[str], None]) -> str | PacelineError:
    """What the asking process does, when the main rank is that process; a refusal is shared, not raised alone."""
    try:
        check_request(spec, layout_of(spec), say)
        return str(_open_run(spec, Path(out), folder).path)
    except PacelineError as error:
        return error


def _train_in(
    run: RunDir, spec: RunSpec, place: Place, device: Any, say: Callable[[str], None], show: bool, stack: ExitStack
) -> dict[str, Any]:
    import torch.distributed as dist
    from rich.console import Console

    from paceline.record.environment import environment
    from paceline.record.events import EventWriter, read_steps
    from paceline.record.summary import show as show_summary
    from paceline.record.summary import summarise
    from paceline.training.loop import train_loop
    from paceline.training.setup import build_job, go_back

    main = place.rank == 0
    events = stack.enter_context(EventWriter(run.events_file(place.rank)))
    job = build_job(spec, place, device, run, events, stack)
    started_at = go_back(job, run, place.world, say)
    if main:
        events.write("start", **environment(), ranks=place.world, launcher=place.launcher, device=str(device))
        if started_at:
            events.write("resume", step=started_at)
        for line in headline(job, run):
            say(line)
        job.shown = stack.enter_context(_audience(job, run, started_at, show))
    began = perf_counter()
    try:
        status = train_loop(job)
        job.checkpoints.wait()
    except RunFailed as error:
        events.write("end", status="failed", error=str(error))
        raise
    events.write("end", status=status)
    summary: dict[str, Any] = {}
    peaks = _peaks(device, place.world)
    if main:
        stack.pop_all().close()
        summary = summarise(
            spec,
            job.layout.equation(),
            read_steps(run.events_file(0)),
            job.evaluation,
            status,
            seconds=perf_counter() - began,
            parameters=sum(p.numel() for p in job.state.model.parameters()),
            peak_bytes_per_rank=peaks,
        )
        write_json(run.summary_file, summary)
        if show:
            show_summary(summary, Console())
            say(f"run folder {run.path}")
            if status == "stopped":
                why = job.stop.signal_name or "another rank"
                say(f"stopped by {why}; go on with  paceline train --resume {run.path}")
    box = [summary]
    if place.world > 1:
        dist.broadcast_object_list(box)
    return {"path": str(run.path), **box[0]}


def headline(job: Job, run: RunDir) -> list[str]:
    """What a run is, as equations, before it starts."""
    from paceline.explain import equations

    return [f"{run.path}", *(f"  {line}" for line in equations(job.spec, job.order.samples))]


def _audience(job: Job, run: RunDir, started_at: int, show: bool) -> Any:
    from paceline.record.audience import audience

    return audience(job.spec, run, job.order.seen(job.steps), job.order.seen(started_at), show)


def _peaks(device: Any, world: int) -> list[int]:
    """Most memory each rank held: of the device, or of the process on a CPU."""
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks: list[Any] = [peak]
    if world > 1:
        peaks = [None] * world
        dist.all_gather_object(peaks, peak)
    return peaks


def _open_run(spec: RunSpec, out: Path, resume: str | Path | None) -> RunDir:
    if resume is None:
        return RunDir.claim(out, spec.name, spec)
    run = RunDir.open(Path(resume))
    _same_answer(run, spec)
    return run


def _same_answer(run: RunDir, spec: RunSpec) -> None:
    """A run goes on as it began: whatever would change its answer is refused by name."""
    old = {key: value for key, value, _, _ in run.spec().fields()}
    for key, value, _, _ in spec.fields():
        if old.get(key) != value and not key.startswith(MAY_CHANGE):
            raise UserError(
                f"{run.path} was begun with {key}={old.get(key)} and cannot go on with {key}={value}; "
                "leave it as it was, or start a new run"
            )


def _as_placed(spec: RunSpec, place: Place) -> RunSpec:
    """Under a launcher its number of ranks counts; a run file that insists on another is refused."""
    if place.world == spec.parallel.ranks:
        return spec
    if spec.origin("parallel.ranks") != DEFAULT and spec.parallel.ranks != 1:
        raise UserError(
            f"parallel.ranks={spec.parallel.ranks} ({spec.origin('parallel.ranks')}), but {place.launcher} started "
            f"{place.world}; give the same number to both, or leave parallel.ranks out"
        )
    return spec.replace({"parallel.ranks": place.world})


def _keys(spec: RunSpec) -> list[str]:
    return [key for key, *_ in spec.fields()]


def _result(answer: dict[str, Any]) -> RunResult:
    path = Path(answer["path"])
    return RunResult(path, {k: v for k, v in answer.items() if k != "path"})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    pass
