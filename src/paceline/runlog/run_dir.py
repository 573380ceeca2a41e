"""The run folder: one per run, never shared by two, and complete enough to do the run again.

runs/NAME/  spec.yaml  events/rank0.jsonl …  checkpoints/  kept/  summary.json  jobs.jsonl
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from paceline import __version__
from paceline.config import DEFAULT, RunSpec, build_recorded_spec, build_spec
from paceline.config import trust as trusting
from paceline.config.registry import is_script
from paceline.config.run_file import RENAMED_KEYS, rename_old_keys
from paceline.errors import RunFailed, UserError, did_you_mean
from paceline.io.escape import to_one_line
from paceline.io.files import hash_file, read_json, read_sealed, write_atomic, write_json
from paceline.io.locks import hold_lock
from paceline.io.safe_yaml import load_yaml, read_yaml_text
from paceline.runlog.events import read_events
from paceline.workload import LogFn

COMMENT_COLUMN = 44
LISTED = 10
PATIENCE_S = 40
KNOWN_BY = ("spec.yaml", "measure.json", "links.json")
"""Files that make a folder a run, a measurement or a measurement of links."""

KEPT_SUMS = ".sums.json"
"""In `kept`: the checksum of each file."""


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def spec_file(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def origins_file(self) -> Path:
        """Where each value of the spec came from, by its key; defaults are left out."""
        return self.path / "spec_origins.json"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def origin_file(self) -> Path:
        """Who made the folder, where the run has code of its own."""
        return self.path / trusting.ORIGIN

    @property
    def begun(self) -> bool:
        """Whether this is the folder of a run; a name that no file can have is none."""
        return os.path.isfile(self.spec_file) and os.path.isdir(self.events)

    @property
    def heartbeats(self) -> Path:
        """What each rank is at, and its stack if it was silent for long."""
        return self.path / "heartbeats"

    @property
    def pictures(self) -> Path:
        """Of what the model found at each evaluation, `NAME-STEP.png`."""
        return self.path / "pictures"

    @property
    def kept(self) -> Path:
        """What using the model takes beside its weights: a tokeniser, the names of classes."""
        return self.path / "kept"

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    @property
    def jobs_file(self) -> Path:
        """What schedulers were asked to do for this run (`runlog/jobs.py`)."""
        return self.path / "jobs.jsonl"

    def events_file(self, rank: int) -> Path:
        return self.events / f"rank{rank}.jsonl"

    @classmethod
    def claim(cls, out: Path, name: str, spec: RunSpec, *, exactly: bool = False) -> RunDir:
        """Make OUT/NAME, or NAME-2, NAME-3 … where that is taken. spec.yaml comes last: it makes a folder a run.

        `exactly`: OUT/NAME itself, which may be there already, but is not a run yet.
        """
        if not name or "/" in name or name in (".", ".."):
            raise UserError(f"name: {name!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
        try:
            out.mkdir(parents=True, exist_ok=True)
            run = cls(out / name if exactly else _first_free(out, name))
            run.path.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:
            raise _unwritable(out, getattr(error, "strerror", None) or str(error)) from None
        try:
            run.events.mkdir(exist_ok=exactly)
            run.checkpoints.mkdir(exist_ok=exactly)
            if (origin := trusting.sign_run_folder(run.path, _anchored(spec))) is not None:
                write_atomic(run.origin_file, origin)
            run.rewrite(spec)
        except (OSError, RunFailed) as error:
            for file in (run.origin_file, run.origins_file):
                file.unlink(missing_ok=True)
            for folder in (run.events, run.checkpoints, run.path):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise _unwritable(out, str(error)) from None
        return run

    @classmethod
    def named(cls, path: Path) -> RunDir:
        """What somebody means who types the folder of a run, or its spec.yaml."""
        if "\0" in str(path):
            raise UserError(f"{str(path)!r} is not a path: no file has such a name")
        return cls(path.parent if path.name == "spec.yaml" else path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run."""
        run = cls.named(path)
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
        raise UserError(f"{path} {missing}{_say_runs(path)}")

    @contextlib.contextmanager
    def lock(self, log: LogFn) -> Iterator[None]:
        """Let only one process train the run; wait a while for the ranks of a killed launcher to end."""
        self._check_links()
        waiting = f"{self.path} is still being trained by another process; waiting for it to end"
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(hold_lock(self.lock_file, lambda: log(waiting), PATIENCE_S))
            except TimeoutError:
                raise UserError(
                    f"{self.path} is being trained by another process; stop that first", code="busy", key=str(self.path)
                ) from None
            except OSError as error:
                raise UserError(
                    f"{self.path} cannot be written to: {error.strerror}; make it writable first",
                    code="not-writable",
                    key=str(self.path),
                ) from None
            yield

    def _check_links(self) -> None:
        """A folder of a run may lie on another disk, but not in another run: that would be written to."""
        for folder in (self.events, self.checkpoints, self.heartbeats, self.kept, self.pictures):
            home = folder.resolve().parent
            if folder.is_symlink() and RunDir(home).begun and home != self.path.resolve():
                raise UserError(f"{folder} is a link into another run, {home}; remove it")

    def check_kept(self) -> None:
        """That what is kept lies in this folder, and is what was kept.

        An export copies it, and a link may lead to any file; with another tokeniser a model says something else.
        """
        home = self.path.resolve()
        for path in self.kept.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise UserError(f"{path} is a link out of the run, and is not followed; put the file itself there")
        if (file := self.kept / KEPT_SUMS).exists():
            for name, known in read_sealed(file).items():
                if _checksum(self.kept / name) != known:
                    raise UserError(f"{self.kept / name} is damaged: it is not what the run kept, its checksum differs")

    def start(self) -> dict[str, Any]:
        """The first "start" event of the main rank; empty where no rank has begun."""
        return next(read_events(self.events_file(0), "start"), {})

    def rewrite(self, spec: RunSpec) -> None:
        """Write the spec that the run starts or continues with, and where its values came from."""
        write_json(self.origins_file, spec.origins)
        write_atomic(self.spec_file, _write_spec(spec, self.spec_file))

    def spec(self, code: Path | None = None) -> RunSpec:
        """The spec as it was when the run began or was extended, each value with the origin it had then.

        Its own code is executed: that of a run from elsewhere needs `trust`. `code` is a file that has the run's own
        workload class, instead of the one it was trained from; who names it has read it.
        """
        values, origins = self._read_spec()
        if code is not None:
            cls = "" if is_script(workload := str(values.get("workload"))) else f":{workload.rpartition(':')[2]}"
            values["workload"] = f"{code.resolve()}{cls}"
        else:
            trusting.check_trusted(self.path, values)
        return self._built(build_spec, values, origins)

    def spec_like(self, other: RunSpec) -> RunSpec:
        """The spec as it was, read by the code of `other`: what would be executed anyway."""
        return self._built(partial(build_spec, entry=other.entry), *self._read_spec())

    def trust(self) -> None:
        """This user trusts the code that the run names, from now on."""
        trusting.remember_trust(self.path, self._read_spec()[0])

    def recorded_spec(self) -> RunSpec:
        """The same for those who look at a run: as data, with none of its code executed."""
        return self._built(build_recorded_spec, *self._read_spec())

    def _built(self, make: Callable[..., RunSpec], values: dict[str, Any], origins: dict[str, str]) -> RunSpec:
        try:
            return make(values, origins)
        except UserError as error:
            raise UserError(f"{self.spec_file} does not describe a run that can be read:\n{error}") from None

    def _read_spec(self) -> tuple[dict[str, Any], dict[str, str]]:
        origins: dict[str, str] = {}

        def read_comments(node: yaml.Node) -> None:
            origins.update(_read_comment_origins(node, "", text.split("\n")))

        recorded = os.path.isfile(self.origins_file)
        try:
            text = read_yaml_text(self.spec_file)
            values = load_yaml(text) if recorded else load_yaml(text, read_comments)
        except OSError as error:
            raise UserError(f"{self.spec_file} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            at = f" at line {mark.line + 1}" if mark else ""
            raise UserError(f"{self.spec_file} is damaged{at}: it is not YAML") from None
        if not isinstance(values, dict):
            raise UserError(f"{self.spec_file} is damaged: it holds no sections")
        if recorded:
            origins = {key: origin for key, origin in read_json(self.origins_file).items() if isinstance(origin, str)}
        return rename_old_keys(values), {RENAMED_KEYS.get(key, key): origin for key, origin in origins.items()}


def _checksum(file: Path) -> str:
    try:
        return hash_file(file)
    except (OSError, ValueError):
        return ""


def find_recorded_spec(words: Sequence[str]) -> RunSpec | None:
    """The spec of a run that is there, where its folder is all that was typed: who looks executes nothing."""
    run = RunDir.named(Path(*words[:1]))
    return run.recorded_spec() if len(words) == 1 and run.begun else None


def trust(run: str | Path) -> None:
    """This user trusts the code that a run folder from elsewhere names: verbs may execute it from now on."""
    RunDir.open(Path(run)).trust()


def trust_named_runs(arguments: Mapping[str, Any]) -> None:
    """`--trust`: the code of the runs that are named after a verb may be executed, now and later."""
    named = [arguments.get("resume"), arguments.get("start"), arguments.get("run"), *arguments.get("words", [])[:1]]
    runs = [run for word in named if word and (run := RunDir.named(Path(word))).begun]
    if not runs:
        raise UserError("--trust is for the code of a run folder, and none is named")
    for run in runs:
        run.trust()


def _first_free(out: Path, name: str) -> Path:
    for number in count(1):
        path = out / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("count never ends")


def _unwritable(out: Path, why: str) -> UserError:
    return UserError(f"cannot make a run folder in {out}: {why}; choose a folder you can write to, with --out FOLDER")


def find_runs(folder: Path) -> list[RunDir]:
    """The runs in a folder, newest first."""
    try:
        runs = [RunDir(path) for path in folder.iterdir() if os.path.isfile(path / "spec.yaml")]
        return sorted(runs, key=lambda run: run.spec_file.stat().st_mtime, reverse=True)
    except OSError:
        return []


def list_result_folders(folder: Path) -> list[Path]:
    """The runs and measurements right below a folder, by name."""
    below = sorted(path for path in folder.iterdir() if path.is_dir())
    return [path for path in below if any(os.path.isfile(path / name) for name in KNOWN_BY)]


def _say_runs(path: Path) -> str:
    """The runs a person may have meant: those inside a folder of runs, else those beside."""
    inside = find_runs(path)
    folder, runs = (path, inside) if inside else (path.parent, find_runs(path.parent))
    if not runs:
        return f"; there are no runs in {folder}"
    more = f" and {len(runs) - LISTED} older" if len(runs) > LISTED else ""
    return f"; runs in {folder}: {', '.join(run.path.name for run in runs[:LISTED])}{more}"


def _write_spec(spec: RunSpec, file: Path) -> str:
    """Every value on a line of its own with its origin behind it."""
    lines = list(_lines(_anchored(spec), spec, "", ""))
    width = min(COMMENT_COLUMN, max(len(text) for text, _ in lines))
    head = f"# Every value of this run and where it came from. Run it again (paceline {__version__}) with\n"
    head += f"#   paceline train {to_one_line(shlex.quote(str(file.resolve())))}\n"
    return head + "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def _lines(values: dict[str, Any], spec: RunSpec, prefix: str, indent: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        origin = to_one_line(spec.origin(key))
        if isinstance(value, dict) and value:
            yield f"{indent}{_inline(name)}:", "" if origin == DEFAULT else origin
            yield from _lines(value, spec, f"{key}.", indent + "  ")
        else:
            yield f"{indent}{_inline(name)}: {_inline(value)}", origin


def _inline(value: Any) -> str:
    """A value as one line of YAML."""
    text = _one_document(value)
    return text if "\n" not in text else _one_document(value, default_style='"')


def _one_document(value: Any, **style: Any) -> str:
    text: str = yaml.safe_dump(
        value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False, **style
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _anchored(spec: RunSpec) -> dict[str, Any]:
    """All values, in which paths relative to the current folder are made to mean the same from the run folder."""
    values = spec.dump()
    for name in ("model", "data", "parallel"):
        for key in getattr(spec, name).paths():
            given = values[name][key]
            if isinstance(given, str) and not given.startswith("~"):
                values[name][key] = os.path.abspath(given)
            elif isinstance(given, list):
                values[name][key] = [os.path.abspath(path) for path in given]
    if is_script(values["workload"]):
        values["workload"] = os.path.abspath(values["workload"])
    place, colon, cls = values["workload"].rpartition(":")
    if colon and os.path.isfile(place):
        values["workload"] = f"{os.path.abspath(place)}:{cls}"
    return values


def _read_comment_origins(node: yaml.Node, prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, origin) from the comment behind each value: folders of older versions have no `spec_origins.json`."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        end = key.end_mark if block else value.end_mark
        rest = lines[end.line][end.column :].lstrip(": ") if end.line < len(lines) else ""
        if rest.startswith("#") and (origin := rest[1:].strip()) != DEFAULT:
            yield name, origin
        yield from _read_comment_origins(value, f"{name}.", lines)
