"""Be one rank: join the others, build the job, run it, write the summary. Only the main rank prints."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from paceline.config import RunSpec
from paceline.config.registry import describe_error
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.io import terminal
from paceline.io.files import to_flat, write_json
from paceline.io.terminal import build_console
from paceline.launch.environment import SINGLE_RANK, RankInfo, detect_rank
from paceline.launch.hang_diagnosis import heartbeat_scope, name_silent_rank
from paceline.launch.root_cause import is_secondary
from paceline.launch.signals import StopRequest
from paceline.layout import Layout
from paceline.runlog.events import EventWriter, RunStatus, extract_metrics, read_events, read_steps, sum_wall_seconds
from paceline.runlog.jobs import detect_scheduler_job
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Show, Summary, build_evaluation, compute_summary, print_summary, read_summary
from paceline.trainer.failures import translate_failures
from paceline.trainer.run import save_inference_assets
from paceline.workload import BaseWorkload, LogFn, OwnLoop, Workload, build_workload, ignore_log

if TYPE_CHECKING:
    import torch

    from paceline.trainer.context import Job, RunContext


VISIBLE_WITHIN_S = 5.0  # for a file that one machine has written to be seen on another
RunFolder: TypeAlias = RunDir | Callable[[LogFn], RunDir]
"""The run's folder, or what the main rank must call to get one if no process before it has."""


def log_line(text: str) -> None:
    """Print the progress of a run to standard output; standard error is for errors."""
    with suppress(OSError, ValueError):  # nobody reads it any more: the run continues
        terminal.print_text(text)


def run_rank(
    spec: RunSpec,
    layout: Layout,
    show: Show,
    folder: RunFolder,
    workload: BaseWorkload | None = None,
    rank_info: RankInfo | None = None,
) -> tuple[Path, Summary]:
    """Train as one rank; return (run folder, summary), the same on every rank."""
    from paceline.launch.process_group import broadcast_from_main

    rank_info = rank_info or detect_rank(os.environ) or SINGLE_RANK
    if isinstance(workload := workload or build_workload(spec), OwnLoop):
        with translate_failures(spec), record_failure(folder, rank_info):
            return cast("tuple[Path, Summary]", workload.drive(layout, rank_info, bool(show), folder))
    with translate_failures(spec), StopRequest(unsupervised=rank_info is SINGLE_RANK) as stop, ExitStack() as held:
        with ExitStack() as starting:
            if isinstance(folder, RunDir):
                starting.enter_context(heartbeat_scope(folder.heartbeats, rank_info, spec.parallel.timeout_s))
            with record_failure(folder, rank_info):
                if isinstance(workload, Workload):  # before there are a device and threads
                    from paceline.data.workers import start_workers

                    held.enter_context(start_workers(workload, rank_info, -(-layout.global_batch // layout.data)))
            device = held.enter_context(join_run(spec, rank_info))
        log = log_line if show and rank_info.rank == 0 else ignore_log
        run: RunDir = folder if isinstance(folder, RunDir) else broadcast_from_main(lambda: folder(log))
        return run.path, train_rank(run, spec, layout, workload, rank_info, device, stop, show)


def join_run(spec: RunSpec, rank_info: RankInfo) -> AbstractContextManager[torch.device]:
    """Join the other ranks on the kind of device that the run asks for."""
    import torch

    from paceline.launch.process_group import join_ranks

    parallel, kind = spec.parallel, spec.parallel.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return join_ranks(rank_info, kind, parallel.threads, parallel.timeout_s, parallel.backend)


@contextmanager
def record_failure(folder: RunFolder, rank_info: RankInfo) -> Iterator[None]:
    """Record a failure before there is a job in the folder of the run, if it has one."""
    try:
        yield
    except Exception as error:
        if rank_info.rank == 0 and isinstance(folder, RunDir):
            with EventWriter(folder.events_file(0)) as events:
                _note_failure(folder, events, None, error)
        raise


def train_rank(
    run: RunDir,
    spec: RunSpec,
    layout: Layout,
    workload: BaseWorkload,
    rank_info: RankInfo,
    device: torch.device,
    stop: StopRequest,
    show: Show = False,
) -> Summary:
    """Start or resume a run as one of its ranks, which have joined."""
    from paceline.trainer.setup import build_job

    with open_rank_session(run, spec, layout, rank_info, device, stop, show, workload.fingerprint()) as session:
        job = build_job(session.context, workload)
        if session.begin(job):
            session.end(job.run())
    return cast(Summary, session.summary)


@dataclass
class RankSession:
    """What a rank does before the first step and after the last, whoever makes the steps."""

    run: RunDir
    context: RunContext
    show: Show
    log: LogFn
    job: Job | None = None
    summary: Summary | None = None
    ended: Summary | None = None  # the summary on the main rank, if this attempt made steps
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def main(self) -> bool:
        return self.context.rank_info.rank == 0

    def begin(self, job: Job) -> bool:
        """Restore the job and record its start; return False if nothing is left to do."""
        from paceline.runlog.loggers import open_event_sink

        self.job, context, run = job, self.context, self.run
        if context.checkpoint is not None:
            job.restore(context.checkpoint)
        if job.done:
            self.summary = _summarize_finished(run, job, self.log) if self.main else None
            return False
        first = 0 if context.checkpoint is None else context.checkpoint.step
        again = first > 0 or any(read_events(run.events_file(context.rank_info.rank), "start"))
        _note_start(job, first, again, self.log)
        if self.main:
            _prepare_folder(run, context.spec, job, self.log)
            length = job.facts.order.seen(job.facts.steps), job.facts.order.seen(first)
            sink = open_event_sink(context.spec, run, *length, bool(self.show), job.facts.pauses)
            context.show_event = self.held.enter_context(sink)
        return True

    def end(self, status: RunStatus) -> None:
        assert self.job is not None
        context, reason = self.context, self.job.stop_reason
        context.beat("end", None)
        context.checkpoints.wait()
        if self.main:
            context.show_event({"kind": "end", "status": status})
            self.held.close()
            context.events.write("end", status=status, **({"why": reason} if reason else {}))
        peaks = _gather_peaks(context.device)
        if self.main:
            self.summary = self.ended = _write_summary(self.run, self.job, status, peaks, reason)


@contextmanager
def open_rank_session(
    run: RunDir,
    spec: RunSpec,
    layout: Layout,
    rank_info: RankInfo,
    device: torch.device,
    stop: StopRequest,
    show: Show,
    data: str = "",
) -> Iterator[RankSession]:
    """Lock the run's folder and open its events; record a failure there."""
    from paceline.launch.process_group import broadcast_from_main, raise_on_all
    from paceline.trainer.agreement import check_ranks_agree
    from paceline.trainer.checkpoint.reader import GROUP_KEY, find_newest
    from paceline.trainer.checkpoint.writer import CheckpointWriter
    from paceline.trainer.context import RunContext

    main, log = rank_info.rank == 0, log_line if show and rank_info.rank == 0 else ignore_log
    full, timeout_s = spec.train.checkpoint_format == "full", spec.parallel.timeout_s
    with ExitStack() as held:
        if run.lock_fds is None:  # else its launcher holds the lock
            broadcast_from_main(lambda: held.enter_context(run.lock(log, timeout_s / 2)).remove_heartbeats())
        beat = held.enter_context(heartbeat_scope(run.heartbeats, rank_info, timeout_s))
        events = held.enter_context(EventWriter(run.events_file(rank_info.rank)))
        checkpoints = held.enter_context(closing(CheckpointWriter(run.checkpoints, spec.train.keep, full)))
        session: RankSession | None = None
        try:
            raise_on_all(check_shared_folder(run, rank_info))
            check_ranks_agree(spec, data, rank_info.local_rank)
            checkpoint = broadcast_from_main(lambda: find_newest(run.checkpoints, log))
            if checkpoint is not None and (group := checkpoint.meta.get(GROUP_KEY, 1)) > 1:  # that of its first layout
                spec = spec.replace({"train.batchnorm_group": group})
            context = RunContext(spec, layout, rank_info, device, run.path, events, checkpoints, stop, checkpoint, beat)
            session = RankSession(run, context, show, log)
            with session.held:
                yield session
            mine = session.summary
            session.summary = broadcast_from_main(lambda: mine)
            beat.remove()
        except Exception as error:
            cause = name_silent_rank(error, run.heartbeats, rank_info)
            beat("failed", None)
            with suppress(RunFailed):
                checkpoints.wait()  # if it fails as well, then for the same reason
            if main:
                _note_failure(run, events, session.job if session is not None else None, cause)
            if cause is error:
                raise
            raise cause from error
    if show and session.ended:
        _show_end(run, session.ended, log, brief=show == "progress")


def check_shared_folder(run: RunDir, rank_info: RankInfo) -> RunFailed | None:
    """Return what is wrong if this rank does not see the folder that the main one has made."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S  # network file systems take their time
    while not run.spec_file.is_file():
        if time.monotonic() > deadline:
            unseen = f"rank {rank_info.rank} on {socket.gethostname()} does not see {run.spec_file.resolve()}"
            advice = "all ranks must share the run folder; type  --out FOLDER  with one that every machine has"
            return RunFailed(f"{unseen}: {advice}")
        time.sleep(0.1)
    return None


def _show_end(run: RunDir, summary: Summary, log: LogFn, brief: bool) -> None:
    if not brief:
        print_summary(summary, build_console())
    folder = shlex.quote(str(run.path))
    if summary.status == RunStatus.STOPPED:
        log(f"stopped after a checkpoint, as asked; resume with  paceline train --resume {folder}")
    elif not brief:
        log(f"run folder {run.path}; a page of it:  paceline report {folder}")


def _prepare_folder(run: RunDir, spec: RunSpec, job: Job, log: LogFn) -> None:
    """Write what inference needs; record that the run was made longer."""
    from paceline.trainer.resume_guard import EXTENDED, find_extension

    save_inference_assets(run, job.workload)
    if (extension := find_extension(run, spec)) is not None:
        key, before, now, old = extension
        job.context.events.write("extend", key=key, before=before, now=now)
        log(f"  {key} is {now} instead of {before}: {job.describe_length_change(old)}")
        run.rewrite(run.recorded_spec().replace({key: now}, f"{EXTENDED} {before}"))


def _note_failure(run: RunDir, events: EventWriter, job: Job | None, error: Exception) -> None:
    """Record how a run failed, if that can be written."""
    import torch.distributed as dist

    reason = str(error) if isinstance(error, PacelineError) else describe_error(error)
    reason = "another rank failed" if dist.is_initialized() and is_secondary(error) else reason
    with suppress(PacelineError):
        events.write("end", status=RunStatus.FAILED, why=reason)
        if job is not None:
            _write_summary(run, job, RunStatus.FAILED, [], reason)


def _summarize_finished(run: RunDir, job: Job, log: LogFn) -> Summary:
    """Return the summary of a finished run, written now if a kill came before."""
    job.conclude()
    log(f"{run.path} is finished: {job.end}")
    with suppress(UserError):
        if (summary := read_summary(run.summary_file)).status == RunStatus.FINISHED:
            return summary
    job.context.events.write("end", status=RunStatus.FINISHED)
    return _write_summary(run, job, RunStatus.FINISHED, [], job.stop_reason)


def _note_start(job: Job, first: int, again: bool, log: LogFn) -> None:
    """Record the start of this rank; print the equations of the run."""
    import torch

    from paceline.runlog.machine import MachineLoad, describe_environment

    context, info, facts = job.context, job.context.rank_info, job.facts
    machine = describe_environment()
    process = {"argv": sys.argv, "pid": os.getpid(), "rank": info.rank, "ranks": info.world, "launcher": info.launcher}
    process |= {"device": str(context.device), "local_ranks": info.local_world, **detect_scheduler_job(os.environ)}
    work = {"data": job.workload.fingerprint(), "steps": facts.steps, **facts.notes}
    context.events.write("start", **machine, **process, threads=torch.get_num_threads(), **work)
    if again:
        context.events.write("resume", step=first)
    log("\n  ".join([str(context.folder), *facts.equations]))
    if (load := MachineLoad(int(machine["cores"] or 0), os.getloadavg()[0])).busy:
        log(f"  this machine is busy: {load}, so steps take longer than they need to")
    if first:
        log(f"  resuming at step {first} of {facts.steps}")
    elif again:
        log("  there is no whole checkpoint to resume from: starting from the beginning")


def _write_summary(run: RunDir, job: Job, status: RunStatus, peaks: list[int], reason: str) -> Summary:
    from paceline.parallel.compress import describe_difference

    spec, facts, events = job.context.spec, job.facts, run.events_file(0)
    job.context.events.flush()
    goodness = job.workload.goodness
    evaluations = {goodness(extract_metrics(event)): event for event in read_events(events, "evaluate")}
    best = evaluations[max(filter(isfinite, evaluations))] if any(map(isfinite, evaluations)) else None
    workers = facts.notes.get("workers", 1)
    summary = replace(
        compute_summary(spec, facts.layout, read_steps(events), status, facts.order.samples, workers),
        why=reason,
        seconds=sum_wall_seconds(events),
        parameters=facts.parameters,
        evaluation=build_evaluation(job.evaluation, best, job.workload.score if job.evaluation else ""),
        differs_from=describe_difference(spec.parallel),
        peak_bytes_per_rank=tuple(peaks),
    )
    write_json(run.summary_file, to_flat(summary))
    return summary


def _gather_peaks(device: torch.device) -> list[int]:
    """Return the most bytes each rank held, of the device or of the process."""
    import torch

    from paceline.launch.process_group import gather_objects

    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _read_peak_resident()
    peaks = gather_objects(peak)
    return peaks if any(peaks) else []


def _read_peak_resident() -> int:
    """Return the most bytes of this process; `ru_maxrss` counts those of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
