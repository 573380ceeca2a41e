"""The run folder: one per run, never shared, and complete enough to repeat the run.

runs/NAME/  spec.yaml  events/rank0.jsonl …  checkpoints/  kept/  summary.json  jobs.jsonl
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from paceline import __version__
from paceline.config import RunSpec, build_recorded_spec, build_spec
from paceline.config import trust as trusting
from paceline.config.registry import is_script
from paceline.errors import RunFailed, UserError, did_you_mean
from paceline.io.escape import to_one_line
from paceline.io.files import hash_file, hold_lock, read_json, read_sealed, write_atomic, write_json
from paceline.io.remote import fetch_run, find_address
from paceline.io.safe_yaml import load_yaml, read_yaml_text
from paceline.runlog.events import read_events
from paceline.workload import LogFn

WORKLOAD_LINE = re.compile(r"^workload: ([\w./:-]+)(?: +#.*)?$", re.MULTILINE)
MAX_LISTED = 10
PATIENCE_S = 40
RESULT_FILES = ("spec.yaml", "measure.json")  # of a run, a measurement
KEPT_SUMS = ".sums.json"  # in `kept`: the checksum of each file


class _Child:
    """A file or folder of a run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    path: Path
    lock_fds: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    """Descriptors of its lock, if this process or the one that started it holds it; see `lock`."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    spec_file = _Child("spec.yaml")
    origins_file = _Child("spec_origins.json")  # where each value of the spec came from, by its key, without defaults
    summary_file = _Child("summary.json")
    events = _Child("events")
    checkpoints = _Child("checkpoints")
    origin_file = _Child(trusting.ORIGIN)  # who made the folder, if the run has user code (`config/trust.py`)
    heartbeats = _Child("heartbeats")
    pictures = _Child("pictures")  # of each evaluation, `NAME-STEP.png`
    kept = _Child("kept")  # what using the model takes beside its weights: a tokeniser, the names of classes
    lock_file = _Child(".lock")
    jobs_file = _Child("jobs.jsonl")  # the scheduler jobs of this run (`runlog/jobs.py`)

    @property
    def begun(self) -> bool:
        return os.path.isfile(self.spec_file) and os.path.isdir(self.events)

    def events_file(self, rank: int) -> Path:
        return self.events / f"rank{rank}.jsonl"

    @classmethod
    def claim(cls, out: Path, name: str, spec: RunSpec, *, exactly: bool = False) -> RunDir:
        """Create OUT/NAME, or NAME-2, NAME-3 … if that is taken; `exactly`: OUT/NAME itself, which may exist.

        spec.yaml comes last: it makes a folder a run.
        """
        if not name or "/" in name or name in (".", ".."):
            message = f"name: {name!r} cannot name a folder; use letters, digits, '.', '_' and '-'"
            raise UserError(message, code="invalid-value", key="name")
        try:
            out.mkdir(parents=True, exist_ok=True)
            run = cls(out / name if exactly else _make_first_free(out, name))
            run.path.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:
            raise _not_writable(out, getattr(error, "strerror", None) or str(error)) from None
        try:
            run.events.mkdir(exist_ok=exactly)
            run.checkpoints.mkdir(exist_ok=exactly)
            if (origin := trusting.sign_run_folder(run.path, _dump_absolute(spec))) is not None:
                write_atomic(run.origin_file, origin)
            run.rewrite(spec)
        except (OSError, RunFailed) as error:
            for file in (run.origin_file, run.origins_file):
                file.unlink(missing_ok=True)
            for folder in (run.events, run.checkpoints, run.path):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise _not_writable(out, str(error)) from None
        return run

    @classmethod
    def named(cls, path: Path) -> RunDir:
        """Return the run of a folder, or of the spec.yaml in it; it need not exist."""
        if "\0" in str(path):
            raise UserError(f"{str(path)!r} is not a path: no file has such a name", code="invalid-value")
        return cls(path.parent if path.name == "spec.yaml" else path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Return an existing run."""
        run = cls.named(fetch_run(path))
        path = run.path
        if run.spec_file.is_file():
            return run
        if not path.exists():
            runs = {run.name: str(run.path) for run in find_runs(path.parent)}
            missing = f"does not exist{did_you_mean(path.name, runs, cutoff=0.6, shown=runs)}"
        elif not path.is_dir():
            missing = "is a file, not a run folder"
        else:
            missing = "is not a run folder: it has no spec.yaml"
        raise UserError(f"{path} {missing}{_list_near_runs(path)}", code="not-found", key=str(path))

    @contextlib.contextmanager
    def lock(self, log: LogFn, patience_s: float = math.inf) -> Iterator[RunDir]:
        """Hold the run's lock: one process may train it; wait a while for the ranks of a killed launcher to end.

        Yields the run as its ranks get it: they inherit the lock, so that they hold it longer than a killed launcher.
        """
        if self.lock_fds is not None:
            yield self
            return
        self._check_symlinks()
        waiting = f"{self.path} is still being trained by another process; waiting for it to end"
        with contextlib.ExitStack() as held:
            try:
                wait_s = min(PATIENCE_S, patience_s)
                descriptor = held.enter_context(hold_lock(self.lock_file, lambda: log(waiting), wait_s))
            except TimeoutError:
                message = f"{self.path} is being trained by another process; stop that first"
                raise UserError(message, code="busy", key=str(self.path)) from None
            except OSError as error:
                message = f"{self.path} cannot be written to: {error.strerror}; make it writable first"
                raise UserError(message, code="not-writable", key=str(self.path)) from None
            yield replace(self, lock_fds=() if descriptor is None else (descriptor,))

    def remove_heartbeats(self) -> None:
        """Remove what the ranks of an earlier attempt left; call it while the run is locked."""
        if not self.heartbeats.is_symlink():
            shutil.rmtree(self.heartbeats, ignore_errors=True)

    def _check_symlinks(self) -> None:
        """Raise UserError if a folder of the run is a link into another run, which would be written to."""
        for folder in (self.events, self.checkpoints, self.heartbeats, self.kept, self.pictures):
            home = folder.resolve().parent
            if folder.is_symlink() and RunDir(home).begun and home != self.path.resolve():
                message = f"{folder} is a link into another run, {home}; remove it"
                raise UserError(message, code="conflict", key=str(folder))

    def check_kept(self) -> None:
        """Check that `kept` has no links out of the run, which an export would copy, and is what the run wrote."""
        home = self.path.resolve()
        for path in self.kept.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                message = f"{path} is a link out of the run, and is not followed; put the file itself there"
                raise UserError(message, code="not-trusted", key=str(path))
        if (file := self.kept / KEPT_SUMS).exists():
            for name, known in read_sealed(file).items():
                path = self.kept / name
                if not path.is_file() or hash_file(path) != known:
                    raise UserError(f"{path} is damaged: its checksum differs", code="damaged", key=str(path))

    def start(self) -> dict[str, Any]:
        """Return the first "start" event of the main rank; {} if no rank has started."""
        return next(read_events(self.events_file(0), "start"), {})

    def rewrite(self, spec: RunSpec) -> None:
        """Write the spec that the run starts or continues with and, in another file, where its values came from."""
        write_json(self.origins_file, spec.origins)
        write_atomic(self.spec_file, _format_spec(spec, self.spec_file))

    def spec(self, code: Path | None = None) -> RunSpec:
        """Return the spec that the run started or was extended with.

        This executes the run's own code: that of a run from elsewhere must be trusted. `code` is a file with the
        workload class, instead of the one it was trained from.
        """
        values, origins = self._read_spec()
        if code is not None:
            cls = "" if is_script(workload := str(values.get("workload"))) else f":{workload.rpartition(':')[2]}"
            values["workload"] = f"{code.resolve()}{cls}"
        else:
            trusting.check_trusted(self.path, values)
        return self._build_spec(build_spec, values, origins)

    def spec_like(self, other: RunSpec) -> RunSpec:
        """Return the spec, read by the code of `other`, which would be executed anyway."""
        return self._build_spec(partial(build_spec, entry=other.entry), *self._read_spec())

    def trust(self) -> None:
        """Trust the code that the run names, from now on."""
        trusting.remember_trust(self.path, self._read_spec()[0])

    def recorded_workload(self) -> str:
        """Return the workload of the recorded spec, from its own line if it has one: to parse all of it takes long."""
        with contextlib.suppress(OSError):
            if line := WORKLOAD_LINE.search(read_yaml_text(self.spec_file)):
                return line[1]
        return self.recorded_spec().workload

    def recorded_spec(self) -> RunSpec:
        """Return the spec as data, with none of the run's code executed."""
        return self._build_spec(build_recorded_spec, *self._read_spec())

    def _build_spec(self, build: Callable[..., RunSpec], values: dict[str, Any], origins: dict[str, str]) -> RunSpec:
        try:
            return build(values, origins)
        except UserError as error:
            message = f"{self.spec_file} does not describe a run that can be read:\n{error}"
            raise UserError(message, code=error.code, key=error.key) from None

    def _read_spec(self) -> tuple[dict[str, Any], dict[str, str]]:
        problem = "damaged: it holds no sections"
        try:
            values = load_yaml(read_yaml_text(self.spec_file))
        except OSError as error:
            message = f"{self.spec_file} cannot be read: {error.strerror}"
            raise UserError(message, code="unreadable", key=str(self.spec_file)) from None
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            values, problem = None, f"damaged{f' at line {mark.line + 1}' if mark else ''}: it is not YAML"
        if not isinstance(values, dict):
            raise UserError(f"{self.spec_file} is {problem}", code="damaged", key=str(self.spec_file))
        origins: dict[str, str] = {}
        with contextlib.suppress(UserError):  # missing or damaged
            recorded = read_json(self.origins_file).items()
            origins = {key: origin for key, origin in recorded if isinstance(origin, str)}
        return values, origins


def find_recorded_spec(words: Sequence[str]) -> RunSpec | None:
    """Return the recorded spec if a run folder is all that was typed: looking at a run executes nothing."""
    run = RunDir.named(Path(*words[:1]))
    return run.recorded_spec() if len(words) == 1 and run.begun else None


def trust(run: str | Path) -> None:
    """Trust the code that a run folder from elsewhere names: verbs may execute it from now on."""
    RunDir.open(Path(run)).trust()


def trust_named_runs(arguments: Mapping[str, Any]) -> None:
    """Trust, for `--trust`, the code of the runs that are named after a verb."""
    named = [arguments.get("resume"), arguments.get("start"), arguments.get("run"), *arguments.get("words", [])[:1]]
    runs = [run for word in named if word and (run := RunDir.named(Path(word))).begun]
    if not runs:
        message = "--trust is for the code of a run folder, and none is named"
        raise UserError(message, code="missing-value", key="--trust")
    for run in runs:
        run.trust()


def _make_first_free(out: Path, name: str) -> Path:
    path, numbers = out / name, count(2)
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            path = out / f"{name}-{next(numbers)}"


def _not_writable(out: Path, reason: str) -> UserError:
    message = f"cannot make a run folder in {out}: {reason}; choose a folder you can write to, with --out FOLDER"
    return UserError(message, code="not-writable", key="--out")


def find_runs(folder: Path) -> list[RunDir]:
    """Return the runs in a folder, newest first."""
    try:
        runs = [RunDir(path) for path in folder.iterdir() if os.path.isfile(path / "spec.yaml")]
        return sorted(runs, key=lambda run: run.spec_file.stat().st_mtime, reverse=True)
    except OSError:
        return []


def list_result_folders(folder: Path) -> list[Path]:
    """Return the runs and measurements directly below a folder, by name."""
    below = sorted(path for path in folder.iterdir() if path.is_dir())
    return [path for path in below if any(os.path.isfile(path / name) for name in RESULT_FILES)]


def _list_near_runs(path: Path) -> str:
    """List the runs that may have been meant: those inside a folder of runs, else those beside."""
    inside = find_runs(path)
    folder, runs = (path, inside) if inside else (path.parent, find_runs(path.parent))
    if not runs:
        return f"; there are no runs in {folder}"
    more = f" and {len(runs) - MAX_LISTED} older" if len(runs) > MAX_LISTED else ""
    return f"; runs in {folder}: {', '.join(run.path.name for run in runs[:MAX_LISTED])}{more}"


def _format_spec(spec: RunSpec, file: Path) -> str:
    """Format every value, below the command that runs them again."""
    command = f"paceline train {to_one_line(shlex.quote(str(file.resolve())))}"
    head = f"# Every value of this run. Run it again (paceline {__version__}) with\n#   {command}\n"
    values = _dump_absolute(spec)
    return head + str(yaml.safe_dump(values, width=math.inf, allow_unicode=True, sort_keys=False))


def _dump_absolute(spec: RunSpec) -> dict[str, Any]:
    """Dump all values, with paths that mean the same from the run folder."""
    values = spec.dump()
    for name in ("model", "data", "parallel"):
        for key in getattr(spec, name).paths():
            given = values[name][key]
            if isinstance(given, str) and not given.startswith("~"):
                values[name][key] = find_address(given) or os.path.abspath(given)
            elif isinstance(given, list):
                values[name][key] = [find_address(path) or os.path.abspath(path) for path in given]
    if is_script(values["workload"]):
        values["workload"] = os.path.abspath(values["workload"])
    place, colon, cls = values["workload"].rpartition(":")
    if colon and os.path.isfile(place):
        values["workload"] = f"{os.path.abspath(place)}:{cls}"
    return values
