"""Open a run: check the request, prepare data, make or find the folder, keep what inference needs."""

import os
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config import DEFAULT, Parallel, RunSpec, build_spec, find_origin, load, parse_overrides
from paceline.config.registry import find_entry, get_user_module
from paceline.errors import RunFailed, UserError, reject_value
from paceline.io.files import hash_file, sync_folder, write_atomic, write_sealed
from paceline.launch.environment import RankInfo
from paceline.layout import LAYOUT_FIELDS, Layout
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import KEPT_SUMS, RunDir
from paceline.runlog.summary import Summary, read_summary
from paceline.trainer import engines
from paceline.trainer.explain import describe_division
from paceline.trainer.failures import translate_failures
from paceline.trainer.resume_guard import check_resume_request, check_same_answer, find_extension, resolve_added_length
from paceline.workload import BaseWorkload, LogFn, Workload, build_workload, ignore_log

PRELOAD = ("paceline.launch.process_group", "paceline.trainer.setup")  # imported once, before the ranks are forked
SOURCE = "source"


def find_finished_summary(run: RunDir, spec: RunSpec) -> Summary | None:
    """Return the summary of a finished run, unless it is made longer."""
    check_resume_request(run, spec)
    if not run.summary_file.is_file() or find_extension(run, spec) is not None:
        return None
    summary = read_summary(run.summary_file)
    return summary if summary.status == RunStatus.FINISHED else None


def remove_run(run: RunDir) -> None:
    """Remove what a wrong request has left; other files of the folder stay."""
    if any(run.checkpoints.glob("*")):
        return
    for folder in (run.events, run.checkpoints, run.heartbeats, run.kept, run.pictures):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (run.spec_file, run.origins_file, run.summary_file, run.lock_file, run.origin_file):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        run.path.rmdir()


def suggest_resume(run: RunDir) -> str:
    from paceline.trainer.checkpoint.reader import find_newest

    folder = shlex.quote(str(run.path))
    checkpoint = find_newest(run.checkpoints, ignore_log)
    where = "there is no checkpoint yet; start again" if checkpoint is None else f"resume at step {checkpoint.step}"
    return f"  {where} with  paceline train --resume {folder}"


def build_resumed_spec(run: str | Path, overrides: Any = ()) -> RunSpec:
    """Return the spec of a run with new values; a new strategy drops the axes of the old layout."""
    folder = RunDir.open(Path(run))
    old = folder.spec()
    given, origin = resolve_added_length(old, parse_overrides(overrides)), find_origin(overrides)
    if "parallel.strategy" in given:
        plain = {f"parallel.{name}": getattr(Parallel(), name) for name in LAYOUT_FIELDS if name != "ranks"}
        given = {**plain, **given}
    if old.init_from is not None and not old.init_from.exists() and any(folder.checkpoints.glob("step-*")):
        given.setdefault("model.init_from", str(folder.path.resolve()))  # what was read there, the run has itself
    changed = load(folder.spec_file, given, origin)
    for key, *_ in changed.fields():
        if changed.origin(key) != origin:
            changed._origins[key] = old.origin(key)
    check_resume_request(folder, changed)
    return build_spec(changed.dump(), changed._origins)


def build_follow_up_spec(run: str | Path, overrides: Any = ()) -> RunSpec:
    """Return the spec of another run that starts with the weights of this one."""
    from paceline.trainer.init_from import find_tokenizer

    folder = RunDir.open(Path(run))
    old = folder.spec()
    if not find_entry(old.workload).batched:
        reason = f"{folder.path} is a run of {old.workload}, which has no weights to start another run with"
        raise UserError(reason, code="not-supported", key="--from")
    given = parse_overrides(overrides)
    values = {"name": f"{old.name}-next", "model.init_from": str(folder.path)}
    learned = getattr(old.data, "tokenizer", "") is None
    if learned and any(key.startswith("data.") for key in given) and (own := find_tokenizer(folder.path)) is not None:
        values["data.tokenizer"] = str(own)  # other texts would have another vocabulary
    return load(folder.spec_file, {**values, **given})


def open_run(
    spec: RunSpec,
    layout: Layout,
    out: Path,
    resume: str | Path | None,
    log: LogFn,
    workload: Workload | None = None,
    *,
    exactly: bool = False,
    changed_code: bool = False,
) -> tuple[RunDir, Workload]:
    """Check the request, prepare data, make the folder; `exactly` OUT/NAME, even if it exists."""
    from paceline.runlog.loggers import check_loggers

    if spec.parallel.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise reject_value("parallel.device", "cuda", "there is no CUDA device; use cpu", "unavailable")
    engines.check_engine(spec, layout, os.environ)
    check_loggers(spec.train.loggers)
    run = None if resume is None else RunDir.open(Path(resume))
    if run is not None:
        check_resume_request(run, spec)
    init_from = spec.init_from if run is None else None
    if init_from is not None:
        from paceline.trainer.init_from import open_weights

        open_weights(init_from)
    with translate_failures(spec):
        workload = workload or build_workload(spec)
        workload.suits(layout)
        workload.prepare(log)
        for line in describe_division(workload, layout):
            log(line)
        if init_from is not None:
            from paceline.trainer.init_from import check_same_vocabulary

            check_same_vocabulary(workload, init_from, log)
        if run is not None:
            check_same_answer(run, workload, log, changed_code)
    return run or RunDir.claim(out, spec.name, spec, exactly=exactly), workload


def fit_to_launcher(spec: RunSpec, rank_info: RankInfo) -> RunSpec:
    """Return the spec with the launcher's number of ranks; raise UserError if the run file has another."""
    ranks, world = spec.parallel.ranks, rank_info.world
    if world == ranks:
        return spec
    least = spec.parallel.least_ranks
    elastic = least is not None and least <= world <= ranks
    if spec.origin("parallel.ranks") != DEFAULT and ranks != 1 and not elastic:
        given = f"parallel.ranks={ranks} ({spec.origin('parallel.ranks')})"
        reason = f"{given}, but {rank_info.launcher} started {world}; leave parallel.ranks out"
        raise UserError(reason, code="conflict", key="parallel.ranks")
    return spec.replace({"parallel.ranks": world})


def save_inference_assets(run: RunDir, workload: BaseWorkload) -> None:
    """Write RUN/kept in one rename, unless a resumed run has it already."""
    if run.kept.is_dir() or not isinstance(workload, Workload):
        return
    aside = run.path / f".kept.{os.getpid()}"
    try:
        aside.mkdir()
        workload.keep(aside)
        if (own := find_user_file(workload.spec.workload)) is not None:
            (aside / SOURCE).mkdir()
            write_atomic(aside / SOURCE / own.name, own.read_bytes())
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        write_sealed(aside / KEPT_SUMS, {str(file.relative_to(aside)): hash_file(file) for file in files})
        sync_folder(aside)
        aside.rename(run.kept)
    except OSError as error:
        raise RunFailed(f"cannot write {run.kept}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def find_user_file(workload: str) -> Path | None:
    place = get_user_module(workload)
    return Path(place) if place.endswith(".py") else None
