"""`paceline.run`: the run of a script, whoever started the script."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, suppress
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.api import resolve_parallel
from paceline.config import RunSpec, build_spec, load, parse_overrides
from paceline.config.registry import is_script
from paceline.config.run_file import read_yaml_file, set_nested
from paceline.errors import PacelineError, UserError
from paceline.io.terminal import warn
from paceline.launch.environment import SINGLE_RANK, RankInfo, detect_rank
from paceline.launch.exit_codes import print_error
from paceline.layout import layout_of
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir, find_runs
from paceline.runlog.summary import read_summary
from paceline.script.workload import get_injected_run
from paceline.trainer.failures import translate_failures
from paceline.trainer.rank import log_line
from paceline.trainer.run import open_run, remove_run, suggest_resume
from paceline.workload import LogFn, ignore_log

if TYPE_CHECKING:
    from paceline.script.api import ScriptRun

RunFile = str | Path | Mapping[str, Any] | None  # a mapping has the values of a run file
AUTO = "auto"
SCRIPT_ORIGIN = "this script"


def run(
    file: RunFile = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    resume: str | Path | None = None,
    out: str | Path = "runs",
    show: bool = True,
) -> "AbstractContextManager[ScriptRun]":
    """Open the run of the script that calls this: `with paceline.run("run.yaml") as run:`.

    Starts a new run below `out`, or resumes the one in the folder `resume` ("auto": the newest unfinished one of this
    name, if any). The ranks are those that torchrun, srun or mpirun started, or this process alone. A script that was
    started by `paceline train` gets that run, and the arguments are ignored.
    """
    injected = get_injected_run()
    if injected is None:
        return _open_standalone(file, overrides, resume, Path(out), show)
    injected.note_ignored(file, parse_overrides(overrides))
    return injected.open()


@contextmanager
def _open_standalone(
    file: RunFile, overrides: Any, resume: str | Path | None, out: Path, show: bool
) -> "Iterator[ScriptRun]":
    """Open the run of a script that was started by `python train.py`, alone or under a launcher."""
    from paceline.script.rank_run import RankRunFactory

    rank_info = detect_rank(os.environ)
    _install_excepthook(rank_info)
    script = _find_main_script()
    spec = build_script_spec(file, overrides, script, sys.argv[1:])
    resume = _find_unfinished_run(out, spec.name) if resume == AUTO else resume
    if resume is not None:
        before = RunDir.open(Path(resume)).recorded_spec()
        spec = spec.replace({"data.arguments": getattr(before.data, "arguments", ())}, SCRIPT_ORIGIN)
    spec = resolve_parallel(spec, rank_info)
    if rank_info is None:
        _reject_ranks(spec, file, script)
    layout = layout_of(spec)

    def open_folder(log: LogFn) -> RunDir:
        return open_run(spec, layout, out, resume, log, changed_code=True)[0]

    folder = open_folder(log_line if show else ignore_log) if rank_info is None else open_folder
    factory = RankRunFactory(spec, layout, rank_info or SINGLE_RANK, show, folder)
    try:
        with factory.open() as opened:
            yield opened
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(factory.folder, RunDir) and (rank_info or SINGLE_RANK).rank == 0:
            if isinstance(error, UserError) and resume is None:
                remove_run(factory.folder)
            elif show:
                error.add_note(suggest_resume(factory.folder))
        raise


def derive_script_spec(script: Path, overrides: Any = ()) -> RunSpec:
    """Return the spec of a script, by running it until it calls `paceline.run`."""
    from paceline.script.probe import ProbeRun

    plain = build_spec({"workload": str(script.resolve())})
    with translate_failures(plain):
        file, own = ProbeRun(plain, "file").ask()
    return build_script_spec(file, {**own, **parse_overrides(overrides)}, script.resolve(), [])


def build_script_spec(file: RunFile, overrides: Any, script: Path, arguments: Sequence[str]) -> RunSpec:
    """Return the spec of a script from its run file, if any, and overrides."""
    given = {"workload": str(script), **parse_overrides(overrides)}
    if arguments:
        given.setdefault("data.arguments", list(arguments))
    if file is None or isinstance(file, Mapping):
        values: dict[str, Any] = {"name": script.stem, **deepcopy(dict(file or {}))}
        for key, value in given.items():
            set_nested(values, key, value)
        return build_spec(values, dict.fromkeys(given, SCRIPT_ORIGIN))
    named = read_yaml_file(Path(file))[0].get("workload")
    if isinstance(named, str) and not (is_script(named) and (Path(file).resolve().parent / named).resolve() == script):
        message = f"{file} is the run file of {named}, and this is {script}; write  workload: {script.name}"
        raise UserError(message, code="conflict", key="workload")
    spec = load(file, given)
    spec._origins.update(dict.fromkeys(("workload", "data.arguments") & given.keys(), SCRIPT_ORIGIN))
    return spec


def _find_main_script() -> Path:
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():  # a notebook, or a program from standard input
        message = "paceline.run must be called by a script, a file that ranks can run; write yours to train.py"
        raise UserError(message, code="not-supported", key="paceline.run")
    return Path(file).resolve()


def _find_unfinished_run(out: Path, name: str) -> Path | None:
    """Return the newest run of this name, or NAME-2 and so on, if it has steps left."""
    for run in find_runs(out):
        if run.name == name or (run.name.startswith(f"{name}-") and run.name[len(name) + 1 :].isdecimal()):
            with suppress(UserError):
                if read_summary(run.summary_file).status == RunStatus.FINISHED:
                    return None
            return run.path
    return None


def _reject_ranks(spec: RunSpec, file: RunFile, script: Path) -> None:
    if (ranks := spec.parallel.ranks) == 1:
        return
    name = shlex.quote(os.path.relpath(script))
    first = f"paceline train {shlex.quote(str(file))} workload={name}  or  " if isinstance(file, str | Path) else ""
    message = f"parallel.ranks={ranks} ({spec.origin('parallel.ranks')}), and python starts one process; type  {first}"
    raise UserError(f"{message}torchrun --nproc-per-node {ranks} {name}", code="conflict", key="parallel.ranks")


def _install_excepthook(rank_info: RankInfo | None) -> None:
    """End the script after a Paceline error with one message and its exit code instead of a traceback."""
    before = sys.excepthook
    if getattr(before, "plain", False):
        return

    def exit_with_message(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PacelineError):
            before(kind, error, trace)
            return
        with redirect_stderr(sys.__stderr__):  # torch's hook collects what is printed, and loses it
            print_error(error, rank_info or SINGLE_RANK)
            for note in getattr(error, "__notes__", ()):
                warn(note)
        raise SystemExit(error.exit_code)

    exit_with_message.plain = True  # type: ignore[attr-defined]
    sys.excepthook = exit_with_message
