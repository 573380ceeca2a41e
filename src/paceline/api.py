"""Train and resume runs: what `paceline.train` and `paceline.resume` call."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import RunSpec, SpecSource, resolve_spec
from paceline.config.registry import find_entry, find_registered
from paceline.config.run_spec import apply_settings
from paceline.data.frames import is_frame, store_frame
from paceline.errors import OutOfMemory, RunFailed, UserError
from paceline.hardware.catalogue import parse_cluster
from paceline.io.format import duration, format_metrics, number, plural
from paceline.io.limits import check_limits
from paceline.io.remote import fetch_run, fetch_runs, find_address, mark_mirror, upload_run
from paceline.io.table import Tabular
from paceline.launch.environment import SINGLE_RANK, RankInfo, detect_rank
from paceline.layout import Layout, layout_of
from paceline.planner.advice import suggest_memory_savings
from paceline.planner.plan import apply_plan
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Show, Summary
from paceline.trainer import failures
from paceline.trainer.rank import log_line, run_rank
from paceline.trainer.run import (
    PRELOAD,
    build_resumed_spec,
    find_finished_summary,
    fit_to_launcher,
    open_run,
    remove_run,
    suggest_resume,
)
from paceline.workload import BaseWorkload, LogFn, build_workload, ignore_log

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class RunResult(Tabular):
    """A run that ended: its folder and its summary."""

    path: Path
    summary: Summary
    launched: bool = False
    """Whether a launcher has started this process as one of several ranks, each of which has the result."""

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def headline(self) -> str:
        run = self.summary
        metrics = f"; evaluation: {format_metrics(self.metrics)}" if self.metrics else ""
        ended = f"{run.name} {run.status} after {duration(run.seconds)}, {run.trained.steps:,} steps"
        return f"{ended}: last loss {number(run.loss_last)}{metrics}; {self.path}"

    def rows_of_table(self) -> list[dict[str, Any]]:
        run = self.summary
        numbers = {key: getattr(run, key) for key in ("seconds", "samples_per_s", "loss_first", "loss_last")}
        trained = {"samples": run.trained.samples, "steps": run.trained.steps}
        return [{"name": run.name, "status": run.status, **trained, **numbers, **self.metrics}]

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.summary.status)

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.summary.evaluation.metrics)

    def weights(self) -> "dict[str, Tensor]":
        """Return the trained tensors, from the newest checkpoint."""
        from paceline.trainer.checkpoint.reader import find_checkpoint, read_tensors

        return read_tensors(find_checkpoint(RunDir(self.path), "newest"))


def train(
    spec: SpecSource,
    out: str | Path = "runs",
    *,
    resume: str | Path | None = None,
    init_from: str | Path | None = None,
    resume_or_start: bool = False,
    changed_code: bool = False,
    show: Show = True,
    **settings: Any,
) -> RunResult:
    """Train a run (a spec, a run file, its content or a Workload class) into a new folder below `out`, or resume the
    run in `resume`.

    `settings` are values of the run file by name, as in `train(Net, lr=1e-3, ranks=2, data={"path": frame})`; a table
    in memory may stand for a file.

    `resume_or_start`: the folder is `out`/NAME, the same each time. Start the run there, resume it, or return if it is
    finished. `init_from` is a run, a file or a folder with the first weights, as `model.init_from` of the spec.
    `changed_code` resumes even if the user's own code is not what the last checkpoint was made with.
    `show`: print how the run goes and its summary, or with "progress" all but the summary.
    `parallel: auto` on a named cluster becomes the layout that the plan chooses.
    """
    stored: dict[Path, str] = {}
    if isinstance(spec, Mapping):
        spec = _store_frames(spec, stored)
    spec = apply_settings(resolve_spec(spec), _store_frames(settings, stored))
    if init_from is not None:
        spec = spec.replace({"model.init_from": str(init_from)}, "argument init_from")
    if show and (kind := find_registered(spec.workload)) is not None and kind not in _reported:
        _reported.add(kind)
        log_line(f"{kind.__name__} has no file of its own: ranks get it by value; resume and open its runs from here")
    rank_info = detect_rank(os.environ)
    spec = resolve_parallel(spec, rank_info)
    check_limits(spec.parallel.ranks if rank_info is None else rank_info.local_world)
    address = find_address(out)
    folder = Path(out) if address is None else fetch_runs(address, spec.name, resume_or_start)
    known = None if resume is None else fetch_run(Path(resume))
    request = _Request(spec, folder, known, resume_or_start, changed_code, show, address or "")
    try:
        return request.train_here() if rank_info is None else request.train_as_rank(rank_info)
    except OutOfMemory as error:
        if savings := suggest_memory_savings(spec):
            first, *rest = str(error).split("\n")
            error.args = ("\n".join([first, savings, *rest]),)
        raise
    except UserError as error:
        for path, argument in stored.items():
            error.args = (str(error).replace(str(path), argument),)
        raise


_reported: set[type] = set()


def _store_frames(values: Mapping[str, Any], stored: dict[Path, str]) -> dict[str, Any]:
    """Replace tables in memory by Parquet files in the cache, and note which argument each came from."""
    found = {name: {"path": value} if name == "data" and is_frame(value) else value for name, value in values.items()}
    for name, value in found.items():
        if isinstance(value, Mapping):
            found[name] = _store_frames(value, stored)
        elif is_frame(value):
            found[name] = path = store_frame(value, f"argument {name}")
            stored[path] = "the table of argument data" if name == "path" else f"the table of argument {name}"
    return found


def resume(run: str | Path, overrides: Any = (), *, changed_code: bool = False, show: Show = True) -> RunResult:
    """Resume a run from its newest whole checkpoint, on the same or another number of ranks.

    `{"train.epochs": "+2"}` trains it beyond its first length.
    """
    return train(build_resumed_spec(run, overrides), resume=run, changed_code=changed_code, show=show)


def resolve_parallel(spec: RunSpec, rank_info: RankInfo | None) -> RunSpec:
    """Write out the layout: the plan's for `parallel: auto`, with the launcher's number of ranks."""
    chosen = apply_plan(spec, None if rank_info is None else rank_info.world)
    if rank_info is not None:
        return fit_to_launcher(chosen, rank_info)
    if chosen is not spec:
        _check_devices(chosen)
    return chosen


def _check_devices(spec: RunSpec) -> None:
    """Raise UserError if the plan is for devices of another machine."""
    if spec.parallel.device == "cpu" or parse_cluster(spec.cluster).device.synchronous:
        return
    import torch

    here, wanted = torch.cuda.device_count(), spec.parallel.ranks
    if here < wanted:
        reason = f"the plan takes {plural(wanted, 'CUDA device')}, and this machine has {here or 'none'}"
        line = "make launch files with  paceline plan RUN.yaml --emit slurm,  or train here with  cluster=local"
        raise UserError(f"cluster: {spec.cluster}: {reason}; {line}")


@dataclass(frozen=True)
class _Request:
    """One call of `train`, its layout resolved."""

    spec: RunSpec
    out: Path
    resume: Path | None
    resume_or_start: bool
    changed_code: bool
    show: Show
    address: str = ""
    """Where `out` is, if it mirrors a folder of runs elsewhere."""

    def train_as_rank(self, rank_info: RankInfo) -> RunResult:
        """Train as one of the ranks that a launcher has started."""
        log = log_line if self.show and rank_info.rank == 0 else ignore_log
        launched = rank_info.world > 1
        spec, layout, finished = self._find_progress(log)
        if finished is not None:
            return RunResult(*finished, launched)
        with failures.translate_failures(spec):  # before ranks join, who would not wait so long
            workload = build_workload(spec)
            workload.prepare(log)

        def open_folder(log: LogFn) -> RunDir:  # by the main rank alone: others may not see yet what it sees
            return self._open_run(spec, layout, self._find_folder(), log, workload)[0]

        try:
            return RunResult(*run_rank(spec, layout, self.show, open_folder, workload, rank_info), launched)
        except OutOfMemory as error:
            if self.resume_or_start and (folder := self._find_folder()) is not None:
                failures.record_retry(RunDir(folder), spec, layout, error)
            raise

    def train_here(self) -> RunResult:
        """Start the ranks and wait for them."""
        log = log_line if self.show else ignore_log
        spec, layout, finished = self._find_progress(log)
        if finished is not None:
            return RunResult(*finished)
        folder = self._find_folder()
        run, workload = self._open_run(spec, layout, folder, log)
        try:
            with run.lock(log) as locked:  # before any rank writes beside another process
                run.remove_heartbeats()
                result = RunResult(*_train_with_retries(spec, layout, self.show, locked, workload))
                upload_run(result.path)
                return result
        except UserError:
            if folder is None:
                remove_run(run)
            raise
        except RunFailed as error:
            if self.show:
                error.args = (f"{error}\n{suggest_resume(run)}",)
            raise

    def _find_folder(self) -> Path | None:
        """Return the folder of the run to resume; None for a new run."""
        run = RunDir(self.out / self.spec.name)
        return run.path if self.resume_or_start and self.resume is None and run.spec_file.is_file() else self.resume

    def _find_progress(self, log: LogFn) -> tuple[RunSpec, Layout, tuple[Path, Summary] | None]:
        """Return the spec as an earlier attempt left it, its layout and, if it is finished, the run."""
        layout = layout_of(self.spec)
        folder = self._find_folder() if self.resume_or_start else None
        if folder is None:
            return self.spec, layout, None
        if (summary := find_finished_summary(RunDir.open(folder), self.spec)) is not None:
            log(f"{folder} is finished: nothing is left to do")
            return self.spec, layout, (folder, summary)
        spec = failures.apply_recorded_retry(RunDir(folder), self.spec, layout)
        return spec, layout if spec is self.spec else layout_of(spec), None

    def _open_run(
        self, spec: RunSpec, layout: Layout, folder: Path | None, log: LogFn, workload: Any = None
    ) -> tuple[RunDir, BaseWorkload]:
        """Check the request, prepare the data and make the folder, or open the one to resume."""
        options = {"exactly": self.resume_or_start, "changed_code": self.changed_code}
        run, workload = open_run(spec, layout, self.out, folder, log, workload, **options)
        if self.address and run.path.parent == self.out:
            mark_mirror(run.path, f"{self.address.rstrip('/')}/{run.name}")
            upload_run(run.path)
        return run, workload


def _train_with_retries(
    spec: RunSpec, layout: Layout, show: Show, run: RunDir, workload: BaseWorkload | None
) -> tuple[Path, Summary]:
    """Train on ranks of this machine; again in smaller passes, or on fewer ranks, after some failures."""
    try:
        return _run_ranks(spec, layout, show, run, workload)
    except RunFailed as error:
        smaller = failures.halve_micro_batch(spec, layout, error) if isinstance(error, OutOfMemory) else None
        smaller = smaller or failures.drop_lost_ranks(spec, error)
        if smaller is None:
            raise
    # the error and what it referred to are gone by now
    failures.prepare_retry(run, smaller, log_line if show else ignore_log)
    return _train_with_retries(smaller, layout_of(smaller), show, run, None)


def _run_ranks(
    spec: RunSpec, layout: Layout, show: Show, run: RunDir, workload: BaseWorkload | None
) -> tuple[Path, Summary]:
    if layout.ranks == 1 and spec.parallel.engine == "torch":  # other engines change their process for good
        return run_rank(spec, layout, show, run, workload, SINGLE_RANK)
    from paceline.launch.hang_diagnosis import ProcessMonitor
    from paceline.launch.local import run_ranks

    preload = (*PRELOAD, *find_entry(spec.workload).preload)
    monitor = ProcessMonitor(run.heartbeats, spec.parallel.timeout_s)
    work = (spec, layout, show, run)
    return run_ranks(run_rank, work, layout.ranks, preload, monitor, run.lock_fds or ())[0]
