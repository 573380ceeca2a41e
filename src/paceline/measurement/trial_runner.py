"""Trials in turns, and what came of them in measure.json, whatever it is that is tried.

Repeats are interleaved, so that whatever else runs on the machine hits all rows alike. What is done is kept after each
run: a sweep that was stopped goes on where it was. A row that cannot be, or fails, becomes a cell with its reason.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import OutOfMemory, PacelineError, RunFailed, UserError
from paceline.io.arguments import make_output_folder
from paceline.io.files import from_flat, read_json, to_flat, validate_fields, write_json
from paceline.measurement.result import FORMAT, Measurement
from paceline.measurement.rows import BatchLayout, FailedRow, MeasuredRow, combine_repeats, drop_failed
from paceline.measurement.run_times import RunTimes
from paceline.measurement.usage import UsageSampler
from paceline.runlog.machine import describe_environment
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn

STEPS: int = 30
REPEATS: int = 3
MeasureState: TypeAlias = dict[str, Any]
"""The content of measure.json, without what follows from it."""


class AbortTrials(UserError):
    """What one trial found is wrong with all of them: there is no point in going on."""


class Trial(ABC):
    """Something to run, which becomes a row."""

    label: str
    ranks: int

    def run_name(self, repeat: int) -> str:
        return f"{re.sub('[^A-Za-z0-9.]+', '-', self.label)}-{repeat + 1}"

    @property
    @abstractmethod
    def batch(self) -> BatchLayout: ...

    @abstractmethod
    def run(self, path: Path) -> RunTimes:
        """Run it into the folder `path`, which is not there yet."""


AnyTrial: TypeAlias = Trial | FailedRow


@dataclass(frozen=True)
class FinishedRun:
    """A run that is done, as measure.json has it."""

    label: str
    times: dict[str, Any]
    usage: dict[str, float]


@dataclass(frozen=True)
class SavedProgress:
    """What measure.json says of them, by the names of runs; of failures, by the labels of rows."""

    spec: dict[str, Any]
    done: dict[str, dict[str, Any]]
    failed: dict[str, str]
    out_of_memory: tuple[str, ...]


def load_state(
    folder: Path, begun: MeasureState, compared: Callable[[MeasureState], Mapping[str, Any]]
) -> MeasureState:
    """What is done already; a folder that holds the measurement of something else is refused by name.

    `compared` gives what must be the same in both.
    """
    file = folder / "measure.json"
    values = {"format": FORMAT, **begun, "environment": describe_environment(), "load": os.getloadavg()[0]}
    values |= {"done": {}, "failed": {}}
    if not file.is_file():
        return values
    old = read_json(file)
    if old.get("format") != FORMAT:
        raise UserError(f"{file} is of another version; measure into another folder with  --out FOLDER")
    _check_state(file, old)
    before, now = compared(old), compared(values)
    for key in dict.fromkeys([*now, *before]):
        if before.get(key) != now.get(key):
            raise UserError(
                f"{file} was begun with {key}={before.get(key)}, and this is {key}={now.get(key)}; measure into "
                "another folder with  --out FOLDER"
            )
    return {**values, **{key: old[key] for key in ("done", "failed", "out_of_memory") if key in old}}


def _check_state(file: Path, old: MeasureState) -> None:
    """UserError where what is said to be done cannot be."""
    try:
        told = {"failed": old.get("failed", {}), "out_of_memory": old.get("out_of_memory", ())}
        validate_fields(SavedProgress, {**told, "spec": old.get("spec", {}), "done": old.get("done", {})})
        for run in old.get("done", {}).values():
            validate_fields(FinishedRun, {name: run[name] for name in ("label", "times", "usage")})
            from_flat(RunTimes, run["times"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); measure into another folder with  --out FOLDER") from None


@contextmanager
def run_trials(
    folder: Path,
    begun: MeasureState,
    compared: Callable[[MeasureState], Mapping[str, Any]],
    wanted: Sequence[AnyTrial],
    *,
    repeats: int,
    retry: bool,
    say: LogFn,
) -> Iterator[tuple[MeasureState, dict[str, dict[str, RunTimes]]]]:
    """(the state, the times of all runs) once every trial had its turns; nobody else has the folder meanwhile."""
    make_output_folder(folder)
    with RunDir(folder).lock(say):
        state = load_state(folder, begun, compared)
        if retry:
            forget_failures(state, wanted)
        run_in_turns(wanted, repeats, folder, state, say)
        yield state, collect_times(wanted, state)


def collect_rates(times: Mapping[str, Mapping[str, RunTimes]]) -> dict[str, list[float]]:
    """Samples per second of each run, by row."""
    return {label: [run.samples_per_s for run in runs.values()] for label, runs in times.items()}


def forget_failures(state: MeasureState, wanted: Sequence[AnyTrial]) -> None:
    """Try again what failed before."""
    state.pop("out_of_memory", None)
    for trial in wanted:
        state["failed"].pop(trial.label, None)


def run_in_turns(wanted: Sequence[AnyTrial], repeats: int, folder: Path, state: MeasureState, say: LogFn) -> None:
    for repeat in range(repeats):
        for trial in wanted if repeat % 2 == 0 else wanted[::-1]:
            _run_repeat(trial, repeat, repeats, folder, state, say)


def _run_repeat(trial: AnyTrial, repeat: int, repeats: int, folder: Path, state: MeasureState, say: LogFn) -> None:
    """Run one repeat of one trial, unless it is done or has failed before."""
    if isinstance(trial, FailedRow):
        state["failed"][trial.label] = trial.why
        return
    name = trial.run_name(repeat)
    if name in state["done"] or trial.label in state["failed"]:
        return
    say(f"{trial.label}: repeat {repeat + 1} of {repeats}")
    shutil.rmtree(folder / name, ignore_errors=True)  # of a sweep that was killed
    try:
        with UsageSampler(trial.ranks) as usage:
            times = trial.run(folder / name)
    except AbortTrials:
        raise
    except PacelineError as error:
        state["failed"][trial.label] = str(error)
        if isinstance(error, OutOfMemory):
            state.setdefault("out_of_memory", []).append(trial.label)
        say(f"{trial.label}: {str(error).splitlines()[0]}")
    else:
        state["done"][name] = {"label": trial.label, "times": to_flat(times), "usage": select_usage(usage, times)}
    write_json(folder / "measure.json", state)


def select_usage(usage: UsageSampler, times: RunTimes) -> dict[str, float]:
    """While steps were done: starting takes longer than those of many a sweep. Devices, where the run was on them."""
    if times.began is None or times.ended is None:
        return {}
    found = usage.between(times.began, times.ended)
    return {name: value for name, value in found.items() if times.device or not name.startswith("device")}


def collect_times(wanted: Sequence[AnyTrial], state: MeasureState) -> dict[str, dict[str, RunTimes]]:
    """All runs that were ever done here, by row and name; rows that are wanted first, some of them empty."""
    found: dict[str, dict[str, RunTimes]] = {trial.label: {} for trial in wanted}
    for name, run in state["done"].items():
        found.setdefault(run["label"], {})[name] = from_flat(RunTimes, run["times"])
    return found


def build_rows(
    wanted: Sequence[AnyTrial], state: MeasureState, times: Mapping[str, Mapping[str, RunTimes]]
) -> list[MeasuredRow | FailedRow]:
    """One for each label, fewest ranks first."""
    known = {trial.label: trial for trial in wanted}
    rows = [
        _build_row(label, known.get(label), state, found)
        if found
        else _build_failed_row(known[label], state["failed"].get(label, ""), label in state.get("out_of_memory", ()))
        for label, found in times.items()
    ]
    return sorted(rows, key=lambda row: row.ranks)


def _build_row(label: str, trial: AnyTrial | None, state: MeasureState, times: Mapping[str, RunTimes]) -> MeasuredRow:
    usage = [found for name in times if (found := state["done"][name]["usage"])]
    means = {name: math.fsum(u.get(name) or 0.0 for u in usage) / len(usage) for name in (usage[0] if usage else {})}
    runs = list(times.values())
    ranks, batch = (trial.ranks, trial.batch) if trial is not None else (len(runs[0].busy_s_by_rank), BatchLayout())
    return combine_repeats(label, ranks, runs, batch, tuple(times), means)


def _build_failed_row(trial: AnyTrial, why: str, out_of_memory: bool) -> FailedRow:
    short = "out of memory" if out_of_memory else trim_reason(why)
    return FailedRow(label=trial.label, ranks=trial.ranks, failed=short, why=why, batch=trial.batch)


def trim_reason(why: str) -> str:
    """A reason in the few words that a cell has room for: up to what can be done about it."""
    return why.partition("\n")[0].partition(";")[0]


def write_measurement(found: Measurement, state: MeasureState) -> Measurement:
    """The same, once it is in its file; RunFailed where it has no row with numbers."""
    write_json(found.file, {**state, **found.to_json()})
    rows = found.rows
    if not drop_failed(rows) and isinstance(rows[0], FailedRow):
        raise RunFailed(f"no row could be measured; the first failed so: {rows[0].why.splitlines()[0]}")
    return found
