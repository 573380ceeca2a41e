"""The verb `train`: from a spec to a finished run folder, on one rank or many.

The process that was asked checks the request and prepares the data; ranks then meet, build the same job and enter the
loop. Under torchrun, srun or mpirun the ranks are there already, and each of them was asked.
"""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import COMMAND_LINE, DEFAULT, Parallel, RunSpec, build_spec, load, parse_overrides
from paceline.config.registry import find_entry
from paceline.errors import OutOfMemory, RunFailed, UserError
from paceline.io.format import duration, format_metrics, number
from paceline.io.tabular import Tabular
from paceline.launch.environment import RankInfo, detect_rank
from paceline.layout import LAYOUT_FIELDS, Layout, layout_of
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import Summary, read_summary
from paceline.trainer import engines
from paceline.trainer.failures import translate_failures
from paceline.trainer.init_from.vocabulary import check_same_vocabulary, find_tokenizer
from paceline.trainer.oom_retry import apply_recorded_retry, halve_micro_batch, prepare_retry, record_retry
from paceline.trainer.rank import ignore_line, log_line, run_rank
from paceline.trainer.resume_guard import check_same_answer, check_same_request, find_extension, resolve_added_length
from paceline.workload import BaseWorkload, LogFn, Workload, build_workload

if TYPE_CHECKING:
    from torch import Tensor

PRELOAD = ("paceline.launch.process_group", "paceline.trainer.setup")
"""Imported once, before the ranks part ways."""


@dataclass(frozen=True, repr=False)
class RunResult(Tabular):
    """A run that ended: its folder and its summary."""

    path: Path
    summary: Summary

    @property
    def headline(self) -> str:
        told = self.summary
        metrics = f"; evaluation: {format_metrics(self.metrics)}" if self.metrics else ""
        return (
            f"{told.name} {told.status} after {duration(told.seconds)}, {told.trained.steps:,} steps: "
            f"last loss {number(told.loss_last)}{metrics}; {self.path}"
        )

    def rows_of_table(self) -> list[dict[str, Any]]:
        told = self.summary
        numbers = {key: getattr(told, key) for key in ("seconds", "samples_per_s", "loss_first", "loss_last")}
        trained = {"samples": told.trained.samples, "steps": told.trained.steps}
        return [{"name": told.name, "status": told.status, **trained, **numbers, **self.metrics}]

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.summary.status)

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.summary.evaluation.metrics)

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors, from the newest checkpoint."""
        from paceline.trainer.checkpoint.reader import find_newest, read_tensors

        checkpoint = find_newest(RunDir(self.path).checkpoints, log_line)
        if checkpoint is None:
            raise UserError(f"{self.path} has no whole checkpoint")
        return read_tensors(checkpoint)


def train(
    spec: RunSpec,
    out: str | Path = "runs",
    *,
    resume: str | Path | None = None,
    again: bool = False,
    changed_code: bool = False,
    show: bool = True,
) -> RunResult:
    """Train a spec into a new folder below `out`, or go on with the run in `resume`.

    `again`: the folder is `out`/NAME, the same each time. Begin there, go on, or leave it if it is finished.
    `changed_code`: although the user's own code is not what the run was saved with.
    """
    place = detect_rank(os.environ)
    if place is not None:
        spec = fit_to_launcher(spec, place)
    folder = _find_existing_run(spec, out, resume) if again else resume
    if again and folder is not None and (summary := _read_finished(RunDir.open(Path(folder)), spec)) is not None:
        if show and (place is None or place.rank == 0):
            log_line(f"{folder} is finished: nothing is left to do")
        return RunResult(Path(folder), summary)
    if again and folder is not None:
        spec = apply_recorded_retry(RunDir(Path(folder)), spec)
    if place is not None:
        with translate_failures(spec):  # before the ranks join: a large corpus may take longer than they wait
            workload = build_workload(spec)
            workload.prepare(log_line if show and place.rank == 0 else ignore_line)

        def opened(say: LogFn) -> RunDir:  # by the main rank alone: others may not see yet what it sees
            there = _find_existing_run(spec, out, resume) if again else resume
            return open_run(spec, Path(out), there, say, workload, exactly=again, changed_code=changed_code)[0]

        try:
            return RunResult(*run_rank(spec, show, opened, workload))
        except OutOfMemory as error:
            if again and (there := _find_existing_run(spec, out, resume)) is not None:
                record_retry(RunDir(Path(there)), spec, error)
            raise
    speak = log_line if show else ignore_line
    run, workload = open_run(spec, Path(out), folder, speak, exactly=again, changed_code=changed_code)
    try:
        return RunResult(*_train_with_retries(spec, show, run, workload))
    except UserError:
        if folder is None:
            remove_run(run)
        raise
    except RunFailed as failed:
        if show:
            failed.args = (f"{failed}\n{suggest_resume(run)}",)
        raise


def _find_existing_run(spec: RunSpec, out: str | Path, resume: str | Path | None) -> str | Path | None:
    """The folder that this run has begun in; None where it has not begun."""
    run = RunDir(Path(out) / spec.name)
    return resume if resume is not None else run.path if run.spec_file.is_file() else None


def _read_finished(run: RunDir, spec: RunSpec) -> Summary | None:
    """The summary of a run that has nothing left to do; a spec that would not give the same answer is refused.

    A run whose last checkpoint was damaged since goes on from the one before.
    """
    check_same_request(run, spec)
    if not run.summary_file.is_file() or find_extension(run, spec) is not None:
        return None
    summary = read_summary(run.summary_file)
    return summary if summary.status == RunStatus.FINISHED and _is_last_whole(run) else None


def _is_last_whole(run: RunDir) -> bool:
    from paceline.trainer.checkpoint.reader import DamagedCheckpoint, list_sealed, verify_checkpoint

    try:
        return all(verify_checkpoint(path) for path in list_sealed(run.checkpoints)[:1])
    except DamagedCheckpoint:
        return False


def _train_with_retries(spec: RunSpec, show: bool, run: RunDir, workload: BaseWorkload | None) -> tuple[Path, Summary]:
    """By ranks that are started here; once more in smaller passes, where that is asked for and memory ran out."""
    try:
        return _run_ranks(spec, show, run, workload)
    except OutOfMemory as error:
        smaller = halve_micro_batch(spec, error)
        if smaller is None:
            raise
    prepare_retry(run, smaller, log_line if show else ignore_line)  # what the error held on to is gone by now
    return _train_with_retries(smaller, show, run, None)


def _run_ranks(spec: RunSpec, show: bool, run: RunDir, workload: BaseWorkload | None) -> tuple[Path, Summary]:
    if spec.parallel.ranks == 1 and spec.parallel.engine == "torch":  # others leave traces in their process
        return run_rank(spec, show, run, workload)
    from paceline.launch.hang_diagnosis import ProcessMonitor
    from paceline.launch.local import run_ranks

    preload = (*PRELOAD, *find_entry(spec.workload).preload)
    watch = ProcessMonitor(run.heartbeats, spec.parallel.timeout_s)
    return run_ranks(run_rank, (spec, show, run), spec.parallel.ranks, preload, watch)[0]


def remove_run(run: RunDir) -> None:
    """The request was wrong: nothing is left of it. What is not of a run was there before, and stays."""
    if any(run.checkpoints.glob("*")):
        return
    for folder in (run.events, run.checkpoints, run.heartbeats, run.kept, run.pictures):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (run.spec_file, run.summary_file, run.lock_file, run.origin_file):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        run.path.rmdir()


def suggest_resume(run: RunDir) -> str:
    """The line to type after a failure."""
    from paceline.trainer.checkpoint.reader import find_newest

    if not run.begun:
        return f"  the folder {shlex.quote(str(run.path))} is not there any more; put it back, or train anew"
    checkpoint = find_newest(run.checkpoints, ignore_line)
    where = "there is no checkpoint yet; begin again" if checkpoint is None else f"go on from step {checkpoint.step}"
    return f"  {where} with  paceline train --resume {shlex.quote(str(run.path))}"


def build_resumed_spec(run: str | Path, overrides: Any = ()) -> RunSpec:
    """The spec of a run with new values for what may change: `train.epochs=+2` makes it longer.

    A new strategy is a new layout: what the old one had beside it (tensor and pipeline axes, offload) does not stay.
    """
    folder = RunDir.open(Path(run))
    old = folder.spec()
    given = resolve_added_length(old, parse_overrides(overrides))
    if "parallel.strategy" in given:
        plain = {f"parallel.{name}": getattr(Parallel(), name) for name in LAYOUT_FIELDS if name != "ranks"}
        given = {**plain, **given}
    if old.start is not None and not old.start.exists() and any(folder.checkpoints.glob("step-*")):
        given.setdefault("model.start", str(folder.path.resolve()))  # what was read there, the run has itself
    changed = load(folder.spec_file, given)
    for key, *_ in changed.fields():
        if changed.origin(key) != COMMAND_LINE:
            changed._origins[key] = old.origin(key)
    check_same_request(folder, changed)
    return build_spec(changed.dump(), changed._origins)


def build_follow_up_spec(run: str | Path, overrides: Any = ()) -> RunSpec:
    """The spec of another run that begins with the weights of this one, and is as it was in all that is not given."""
    folder = RunDir.open(Path(run))
    old = folder.spec()
    if not find_entry(old.workload).batched:
        raise UserError(f"{folder.path} is a run of {old.workload}, which has no weights that another could begin with")
    given = parse_overrides(overrides)
    begin = {"name": f"{old.name}-next", "model.start": str(folder.path)}
    learned = getattr(old.data, "tokenizer", "") is None
    if learned and any(key.startswith("data.") for key in given) and (own := find_tokenizer(folder.path)) is not None:
        begin["data.tokenizer"] = str(own)  # other texts would have another vocabulary
    return load(folder.spec_file, {**begin, **given})


def open_run(
    spec: RunSpec,
    out: Path,
    resume: str | Path | None,
    say: LogFn,
    workload: Workload | None = None,
    *,
    exactly: bool = False,
    changed_code: bool = False,
) -> tuple[RunDir, Workload]:
    """Check all that can be known to be wrong before a rank starts, prepare the data, and make the run's folder.

    `exactly`: OUT/NAME, and no other name where that folder is there already.
    """
    from paceline.runlog.loggers import check_loggers

    layout = layout_of(spec)
    if spec.parallel.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("parallel.device=cuda, but there is no CUDA device; use parallel.device=cpu")
    engines.check_engine(spec, layout, os.environ)
    check_loggers(spec.train.loggers)
    run = None if resume is None else RunDir.open(Path(resume))
    if run is not None:
        check_same_request(run, spec)
    start = spec.start
    if run is None and start is not None:
        from paceline.trainer.init_from.weights import open_weights

        open_weights(start, say)
    with translate_failures(spec):
        workload = workload or build_workload(spec)
        workload.suits(layout)
        if isinstance(workload, Workload):
            _import_ahead(spec, layout)
        workload.prepare(say)
        if run is None and start is not None:
            check_same_vocabulary(workload, start, say)
        if run is not None:
            check_same_answer(run, workload, say, changed_code)
    return run or RunDir.claim(out, spec.name, spec, exactly=exactly), workload


def _import_ahead(spec: RunSpec, layout: Layout) -> None:
    """While data are prepared, where a device will make short work of the steps and no worker processes are forked."""
    import torch

    if layout.ranks == 1 and layout.plain and not hasattr(spec.data, "workers") and torch.cuda.is_available():
        from paceline.trainer import setup  # noqa: F401 - before the thread imports
        from paceline.trainer.checkpoint import writer

        writer.start_import()


def fit_to_launcher(spec: RunSpec, place: RankInfo) -> RunSpec:
    """Under a launcher its number of ranks counts; a run file that insists on another is refused."""
    if place.world == spec.parallel.ranks:
        return spec
    if spec.origin("parallel.ranks") != DEFAULT and spec.parallel.ranks != 1:
        raise UserError(
            f"parallel.ranks={spec.parallel.ranks} ({spec.origin('parallel.ranks')}), but {place.launcher} started "
            f"{place.world}; give the same number to both, or leave parallel.ranks out"
        )
    return spec.replace({"parallel.ranks": place.world})
