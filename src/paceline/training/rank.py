"""One rank's life: join the others, build the job, train, sum up. The main rank alone speaks."""

from __future__ import annotations

import os
import re
import resource
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, RunFailed, UserError
from paceline.launch.blame import is_echo
from paceline.launch.environment import ALONE, Place, detect
from paceline.launch.signals import StopRequest
from paceline.own_code import one_line, own_trace
from paceline.record.events import EventWriter, metrics_of, read_events, read_steps, seconds_of
from paceline.record.files import write_json
from paceline.record.run_dir import RunDir
from paceline.record.summary import Summary, evaluation_of, read_summary, summarise
from paceline.record.summary import show as show_summary
from paceline.spec import RunSpec
from paceline.workload import PassWorkload, workload_of

if TYPE_CHECKING:
    import torch

    from paceline.training.loop import Job

Say = Callable[[str], None]
Claim = Callable[[RunSpec, Say], RunDir]


TORCH_SAYS = {
    "'DistributedDataParallel' object has no attribute": (
        "workload: on several ranks the model that loss() gets can only be called; use nothing else of it there"
    ),
    "Expected to have finished reduction in the prior iteration": (
        "workload: on several ranks every parameter must take part in the loss, and some had no gradient"
    ),
}


def say(text: str) -> None:
    """The story of a run goes to standard output; standard error is for what went wrong."""
    with suppress(OSError, ValueError):  # nobody listens any more: the run goes on
        print(text, flush=True)


def silent(text: str) -> None:
    pass


def live(spec: RunSpec, show: bool, folder: RunDir | Claim) -> tuple[Path, Summary]:
    """Train as the rank that the environment says; returns (run folder, summary), the same on every rank.

    `folder` is the run's, or what the main rank must do to get one where no process before it was asked.
    """
    import torch

    from paceline.launch.group import joined

    place = detect(os.environ) or ALONE
    kind = spec.parallel.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    speak = say if show and place.rank == 0 else silent
    together = joined(place, kind, spec.parallel.threads, spec.parallel.timeout_s)
    with foreseen(spec), StopRequest(impatient=place is ALONE) as stop, together as device:
        run: RunDir = folder if isinstance(folder, RunDir) else _from_main(place, lambda: folder(spec, speak))
        summary = _train(run, spec, place, device, stop, speak, show)
        return run.path, _from_main(place, lambda: summary)


@contextmanager
def foreseen(spec: RunSpec) -> Iterator[None]:
    """Lost peers, memory that runs out and mistakes in the user's own code are failures of the run, said as such.

    Any other exception is a mistake of ours and stays what it is.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        if spec.parallel.ranks > 1 and is_echo(error):
            raise RunFailed(f"another rank failed or cannot be reached ({one_line(error)})") from error
        wanted = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        if isinstance(error, MemoryError) or wanted:
            for_what = f" for {wanted[1]} more" if wanted else ""
            raise RunFailed(
                f"there is no memory{for_what}; use a smaller parallel.micro_batch, more ranks or a smaller model"
            ) from error
        for told, meant in TORCH_SAYS.items():
            if told in str(error):
                raise RunFailed(f"{meant} ({one_line(error)})") from error
        if trace := own_trace(error, spec.workload):
            raise RunFailed(f"the workload failed: {one_line(error)}\n\n{trace}") from error
        raise


def _from_main(place: Place, get: Callable[[], Any]) -> Any:
    """What the main rank gets, on every rank; if it is refused, all are, and none waits for the others."""
    import torch.distributed as dist

    box: list[Any] = [None]
    if place.rank == 0:
        try:
            box = [get()]
        except PacelineError as error:
            box = [error]
    if place.world > 1:
        dist.broadcast_object_list(box)
    if isinstance(box[0], PacelineError):
        raise box[0]
    return box[0]


def _train(
    run: RunDir, spec: RunSpec, place: Place, device: torch.device, stop: StopRequest, say: Say, show: bool
) -> Summary | None:
    from paceline.record.audience import audience
    from paceline.training.checkpoint import Checkpoints

    build_job, go_back, work = _way_of(spec)

    with (
        run.held(say) if place.rank == 0 else nullcontext(),
        EventWriter(run.events_file(place.rank)) as events,
        closing(Checkpoints(run.checkpoints, spec.train.keep)) as checkpoints,
    ):
        job: Job | None = None
        try:
            job = build_job(spec, place, device, events, checkpoints, stop, run.path)
            first = go_back(job, run, place.world, say)
            if job.over(first):
                return _done_already(run, job, say) if place.rank == 0 else None
            again = first > 0 or any(read_events(run.events_file(place.rank), "start"))
            _note_start(job, place, first, again)
            if place.rank > 0:
                work(job)
                checkpoints.wait()
                _peaks(device, place.world)
                return None
            _announce(job, run, first, again, say)
            with audience(spec, run, job.order.seen(job.steps), job.order.seen(first), show) as job.shown:
                status = work(job)
                checkpoints.wait()
                job.shown({"kind": "end", "status": status})
            events.write("end", status=status)
            summary = _sum_up(run, job, status, _peaks(device, place.world))
        except Exception as error:
            if place.rank == 0:
                _note_failure(run, events, job, error)
            raise
    if show:
        _show(summary, run, say)
    return summary


def _way_of(spec: RunSpec) -> tuple[Callable[..., Any], Callable[..., int], Callable[[Any], str]]:
    """(build the job, go back to its newest checkpoint, do it): by gradients, or as a fit of the workload's own."""
    if isinstance(workload_of(spec), PassWorkload):
        from paceline.training import fitting

        return fitting.build_fit, fitting.go_back, fitting.fit_loop
    from paceline.training.loop import train_loop
    from paceline.training.setup import build_job, go_back

    return build_job, go_back, train_loop


def _note_failure(run: RunDir, events: EventWriter, job: Job | None, error: Exception) -> None:
    """How a run failed, in its folder. If that cannot be written (a full disk), what failed first stays the error."""
    import torch.distributed as dist

    why = str(error) if isinstance(error, PacelineError) else one_line(error)
    why = "another rank failed" if dist.is_initialized() and is_echo(error) else why
    with suppress(PacelineError):
        events.write("end", status="failed", why=why)
        if job is not None:
            _sum_up(run, job, "failed", [], why=why)


def _done_already(run: RunDir, job: Job, say: Say) -> Summary:
    """Nothing is left to train: the summary as it was written, or now, if a kill came before it."""
    job.conclude()
    say(f"{run.path} is finished: {job.ended}")
    with suppress(UserError):
        if (summary := read_summary(run.summary_file)).status == "finished":
            return summary
    job.events.write("end", status="finished")
    return _sum_up(run, job, "finished", [])


def _note_start(job: Job, place: Place, first: int, again: bool) -> None:
    import torch

    from paceline.record.environment import environment

    job.events.write(
        "start",
        **environment(),
        argv=sys.argv,
        pid=os.getpid(),
        rank=place.rank,
        ranks=place.world,
        launcher=place.launcher,
        device=str(job.device),
        threads=torch.get_num_threads(),
        data=job.workload.fingerprint(),
    )
    if again:
        job.events.write("resume", step=first)


def _announce(job: Job, run: RunDir, first: int, again: bool, say: Say) -> None:
    say(f"{run.path}")
    for line in job.equations():
        say(f"  {line}")
    if first:
        say(f"  going on from step {first} of {job.steps}")
    elif again:
        say("  there is no whole checkpoint to go on from: starting from the beginning")


def _sum_up(run: RunDir, job: Job, status: str, peaks: list[int], why: str = "") -> Summary:
    from paceline.parallel.compress import differs_from

    job.events.flush()
    evaluations = {
        goodness: event
        for event in read_events(run.events_file(0), "evaluate")
        if isfinite(goodness := job.workload.goodness(metrics_of(event)))
    }
    summary = replace(
        summarise(job.spec, job.spread_over, read_steps(run.events_file(0)), status, job.order.samples),
        why=why,
        seconds=seconds_of(run.events_file(0)),
        parameters=job.parameters,
        evaluation=evaluation_of(job.evaluation, evaluations[max(evaluations)] if evaluations else None),
        differs_from=differs_from(job.spec.parallel),
        peak_bytes_per_rank=tuple(peaks),
    )
    write_json(run.summary_file, summary.to_json())
    return summary


def _show(summary: Summary, run: RunDir, say: Say) -> None:
    from rich.console import Console

    show_summary(summary, Console())
    say(f"run folder {run.path}")
    if summary.status == "stopped":
        resume = f"paceline train --resume {shlex.quote(str(run.path))}"
        say(f"stopped after a checkpoint, as asked; go on with  {resume}")


def _peaks(device: torch.device, world: int) -> list[int]:
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
