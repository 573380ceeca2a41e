"""`paceline.run`: where a script meets its run, whoever started the script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.api import resolve_parallel
from paceline.config import RunSpec, build_spec, load, parse_overrides
from paceline.config.registry import is_script
from paceline.config.run_file import read_yaml_file, set_nested
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.io.terminal import warn
from paceline.launch.environment import SINGLE_RANK, RankInfo, detect_rank
from paceline.layout import layout_of
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir, find_runs
from paceline.runlog.summary import read_summary
from paceline.script.injected_run import get_injected_run
from paceline.trainer.failures import translate_failures
from paceline.trainer.rank import ignore_line, log_line
from paceline.trainer.run import open_run, remove_run, suggest_resume
from paceline.workload import LogFn

if TYPE_CHECKING:
    from paceline.script.api import ScriptRun

AUTO = "auto"
SCRIPT_ORIGIN = "this script"


def run(
    file: str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    resume: str | Path | None = None,
    out: str | Path = "runs",
    show: bool = True,
) -> AbstractContextManager[ScriptRun]:
    """The run of the script that calls this: `with paceline.run("run.yaml") as run:`.

    A new run below `out`, or that of the folder `resume` gone on with; "auto" goes on with the newest run of the same
    name that is not finished, if there is one. The ranks are those that torchrun, srun or mpirun started, or this
    process alone. A script that was started by `paceline train` gets that run, and the arguments are left aside.
    """
    given = get_injected_run()
    if given is None:
        return _open_standalone(file, overrides, resume, Path(out), show)
    given.note_ignored(file, parse_overrides(overrides))
    return given.opened()


@contextmanager
def _open_standalone(
    file: str | Path | None, overrides: Any, resume: str | Path | None, out: Path, show: bool
) -> Iterator[ScriptRun]:
    """Of a script that was started by `python train.py`, alone or under a launcher."""
    from paceline.script.rank_run import RankRunFactory

    place = detect_rank(os.environ)
    _install_excepthook(place)
    script = _find_main_script()
    spec = build_script_spec(file, overrides, script, sys.argv[1:])
    resume = _find_unfinished_run(out, spec.name) if resume == AUTO else resume
    if resume is not None:
        before = RunDir.open(Path(resume)).recorded_spec()
        spec = spec.replace({"data.arguments": getattr(before.data, "arguments", ())}, SCRIPT_ORIGIN)
    spec = resolve_parallel(spec, place)
    speak = log_line if show and (place is None or place.rank == 0) else ignore_line
    if place is None:
        _reject_ranks(spec, file, script)
    layout = layout_of(spec)

    def open_folder(log: LogFn) -> RunDir:
        return open_run(spec, layout, out, resume, log, changed_code=True)[0]

    folder = open_folder(speak) if place is None else open_folder
    start = RankRunFactory(spec, layout, place or SINGLE_RANK, show, folder)
    try:
        with start.opened() as found:
            yield found
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(start.folder, RunDir) and (place is None or place.rank == 0):
            if isinstance(error, UserError) and resume is None:
                remove_run(start.folder)
            elif show:
                error.add_note(suggest_resume(start.folder))
        raise


def derive_script_spec(script: Path, overrides: Any = ()) -> RunSpec:
    """The spec that a script would run by, with overrides; the script runs until it says so."""
    from paceline.script.probe import probe_run_file

    plain = build_spec({"workload": str(script.resolve())})
    with translate_failures(plain):
        file, own = probe_run_file(plain)
    return build_script_spec(file, {**own, **parse_overrides(overrides)}, script.resolve(), [])


def build_script_spec(file: str | Path | None, overrides: Any, script: Path, arguments: Sequence[str]) -> RunSpec:
    """The spec of a script by its run file, which need not name the script; without a file, of the overrides alone."""
    given = {"workload": str(script), **parse_overrides(overrides)}
    if arguments:
        given.setdefault("data.arguments", list(arguments))
    if file is None:
        values: dict[str, Any] = {"name": script.stem}
        for key, value in given.items():
            set_nested(values, key, value)
        return build_spec(values, dict.fromkeys(given, SCRIPT_ORIGIN))
    named = read_yaml_file(Path(file))[0].get("workload")
    if isinstance(named, str) and not is_script(named):
        raise UserError(
            f"{file} is the run file of workload {named!r}, and {script.name} is a script; leave workload out of it, "
            f"or write  workload: {script.name}"
        )
    if isinstance(named, str) and (Path(file).resolve().parent / named).resolve() != script:
        raise UserError(f"{file} is the run file of {named}, and this is {script}; start that one, or correct workload")
    spec = load(file, given)
    spec._origins.update(dict.fromkeys(("workload", "data.arguments") & given.keys(), SCRIPT_ORIGIN))
    return spec


def _find_main_script() -> Path:
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():  # a notebook, or a program from standard input
        raise UserError("paceline.run must be called by a script, a file that ranks can run; write yours to train.py")
    return Path(file).resolve()


def _find_unfinished_run(out: Path, name: str) -> Path | None:
    """The newest run of this name, or NAME-2 and so on, that has steps left."""
    for run in find_runs(out):
        if run.name == name or (run.name.startswith(f"{name}-") and run.name[len(name) + 1 :].isdecimal()):
            with suppress(UserError):
                if read_summary(run.summary_file).status == RunStatus.FINISHED:
                    return None
            return run.path
    return None


def _reject_ranks(spec: RunSpec, file: str | Path | None, script: Path) -> None:
    if (ranks := spec.parallel.ranks) == 1:
        return
    name = shlex.quote(os.path.relpath(script))
    first = f"paceline train {shlex.quote(str(file))} workload={name}  or  " if file is not None else ""
    raise UserError(
        f"parallel.ranks={ranks} ({spec.origin('parallel.ranks')}), and python starts one process; type  {first}"
        f"torchrun --nproc-per-node {ranks} {name}"
    )


def _install_excepthook(place: RankInfo | None) -> None:
    """What was foreseen ends the script with one message and its exit code, as it ends a verb; not with a traceback."""
    before = sys.excepthook
    if getattr(before, "plain", False):
        return

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PacelineError):
            before(kind, error, trace)
            return
        several = place is not None and place.world > 1
        if isinstance(error, RunFailed) or not several or (place is not None and place.rank == 0):
            who = f"rank {place.rank}: " if several and place is not None and isinstance(error, RunFailed) else ""
            warn("\n".join([f"paceline: {who}{error}", *getattr(error, "__notes__", ())]))
        raise SystemExit(error.exit_code)

    end.plain = True  # type: ignore[attr-defined]
    sys.excepthook = end
