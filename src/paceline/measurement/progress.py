"""Run the trials of a measurement in turns, sample their usage, and keep in measure.json what is done."""

import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any, TypeAlias

from paceline.config import RunSpec
from paceline.errors import OutOfMemory, PacelineError, RunFailed, UserError, get_first_line
from paceline.io.arguments import make_output_folder
from paceline.io.files import catch_damage, from_flat, read_json, to_flat, write_json
from paceline.measurement.result import FORMAT, Measurement
from paceline.measurement.rows import BatchLayout, FailedRow, MeasuredRow, combine_repeats, drop_failed
from paceline.measurement.run_times import RunTimes
from paceline.runlog.machine import describe_environment, find_device_handles, load_nvml, read_device_usage
from paceline.runlog.run_dir import RunDir
from paceline.trials.runner import AbortTrials, check_same_request, interleave_repeats
from paceline.workload import LogFn

EVERY_S = 0.25
PEAKS = ("device_bytes",)  # maxima; others are means


class UsageSampler:
    """Sample the machine while it is entered: `with UsageSampler(ranks) as usage: …`, then `usage.during(times)`."""

    def __init__(self, ranks: int = 1) -> None:
        self._over = threading.Event()
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._nvml = load_nvml()
        self._devices = find_device_handles(self._nvml, ranks, os.environ) if self._nvml is not None else []

    def __enter__(self) -> "UsageSampler":
        import psutil

        psutil.cpu_percent()
        self._thread = threading.Thread(target=self._sample_until_exit, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def during(self, times: RunTimes) -> dict[str, float]:
        """Return mean usage, and peak device memory, in a run's steady steps; for devices only if it ran on one."""
        begin, end = times.began or 0.0, times.ended or 0.0
        found = _combine([values for t, values in self._samples if begin <= t <= end])
        return {name: value for name, value in found.items() if times.device or not name.startswith("device")}

    def _sample_until_exit(self) -> None:
        """Append CPU, network and device usage to the samples every `EVERY_S` until exit, in a background thread."""
        import psutil

        sent = psutil.net_io_counters(nowrap=False)
        while not self._over.wait(EVERY_S):
            before, sent = sent, psutil.net_io_counters(nowrap=False)
            values = {"cpu_share": psutil.cpu_percent() / 100}
            if before is not None and sent is not None:
                values["sent_bytes_s"] = max(0.0, sent.bytes_sent - before.bytes_sent) / EVERY_S
            self._samples.append((time(), values | self._sample_devices()))

    def _sample_devices(self) -> dict[str, float]:
        found = _combine([read_device_usage(self._nvml, device) for device in self._devices])
        return {name: found[name] for name in ("device_share", "device_bytes") if name in found}


def _combine(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the highest of the bytes in use, and the mean of every other value."""
    names = dict.fromkeys(name for values in samples for name in values)
    by_name = {name: [values[name] for values in samples if name in values] for name in names}
    return {name: max(vs) if name in PEAKS else math.fsum(vs) / len(vs) for name, vs in by_name.items()}


MeasureState: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class MeasureTrial:
    label: str
    ranks: int
    run: Callable[[Path], RunTimes]  # into a folder that does not exist yet
    batch: BatchLayout = field(default_factory=BatchLayout)
    spec: RunSpec | None = None  # a command has none

    def run_name(self, repeat: int) -> str:
        return f"{re.sub('[^A-Za-z0-9.]+', '-', self.label)}-{repeat + 1}"


AnyTrial: TypeAlias = MeasureTrial | FailedRow


@contextmanager
def complete_runs(
    folder: Path,
    trials: Sequence[AnyTrial],
    repeats: int,
    request: MeasureState,
    comparable: Callable[[MeasureState], Mapping[str, Any]],
    retry: bool,
    log: LogFn,
) -> Iterator[MeasureState]:
    """Run the trials that measure.json lacks, write it after each, and yield its state; hold the folder's lock.

    `comparable` selects what must be the same in this request and in the one that the folder was started with.
    """
    make_output_folder(folder)
    with RunDir(folder).lock(log):
        state = load_state(folder, request, comparable)
        done, failed = state["done"], state["failed"]
        if retry:
            state.pop("out_of_memory", None)
            for trial in trials:
                failed.pop(trial.label, None)

        for trial, repeat in interleave_repeats(trials, repeats):
            if isinstance(trial, FailedRow):
                failed[trial.label] = trial.why
                continue
            if (name := trial.run_name(repeat)) in done or trial.label in failed:
                continue
            log(f"{trial.label}: repeat {repeat + 1} of {repeats}")
            shutil.rmtree(folder / name, ignore_errors=True)  # of a measurement that was killed
            try:
                with UsageSampler(trial.ranks) as usage:
                    times = trial.run(folder / name)
                done[name] = {"label": trial.label, "times": to_flat(times), "usage": usage.during(times)}
            except AbortTrials:
                raise
            except PacelineError as error:
                failed[trial.label] = str(error)
                if isinstance(error, OutOfMemory):
                    state.setdefault("out_of_memory", []).append(trial.label)
                log(f"{trial.label}: {get_first_line(error)}")
            write_json(folder / "measure.json", state)
        yield state


ELSEWHERE = "measure into another folder with  --out FOLDER"


def load_state(
    folder: Path, request: MeasureState, comparable: Callable[[MeasureState], Mapping[str, Any]]
) -> MeasureState:
    """Return what is done already; raise UserError if the folder holds the measurement of something else."""
    file = folder / "measure.json"
    values = {"format": FORMAT, **request, "environment": describe_environment(), "load": os.getloadavg()[0]}
    values |= {"done": {}, "failed": {}}
    if not file.is_file():
        return values
    old = read_json(file)
    if old.get("format") != FORMAT:
        raise UserError(f"{file} is of another version; {ELSEWHERE}", code="invalid-format")
    kept: dict[str, Any] = {key: old[key] for key in ("done", "failed", "out_of_memory") if key in old}
    with catch_damage(file, ELSEWHERE):
        for run in kept.get("done", {}).values():
            from_flat(RunTimes, run["times"])
            run["label"], run["usage"] = str(run["label"]), dict(run["usage"])
        before = comparable(old)
    check_same_request(file, before, comparable(values), "measure")
    return values | kept


def collect_times(state: MeasureState) -> dict[str, dict[str, RunTimes]]:
    """Return the times of the finished runs: by label, then by the name of the run."""
    found: dict[str, dict[str, RunTimes]] = {}
    for name, run in state["done"].items():
        found.setdefault(run["label"], {})[name] = from_flat(RunTimes, run["times"])
    return found


def build_rows(trials: Sequence[AnyTrial], state: MeasureState) -> list[MeasuredRow | FailedRow]:
    """Build a row of each trial, and of earlier ones in the folder: its median repeat, or why it failed."""
    times, known = collect_times(state), {trial.label: trial for trial in trials}
    rows = [
        _build_row(label, known.get(label), state, times[label])
        if label in times
        else _build_failed_row(known[label], state)
        for label in dict.fromkeys([*known, *times])
    ]
    return sorted(rows, key=lambda row: row.ranks)


def _build_row(label: str, trial: AnyTrial | None, state: MeasureState, times: Mapping[str, RunTimes]) -> MeasuredRow:
    usage = [found for name in times if (found := state["done"][name]["usage"])]
    means = {name: math.fsum(u.get(name) or 0.0 for u in usage) / len(usage) for name in (usage[0] if usage else {})}
    runs = list(times.values())
    ranks, batch = (trial.ranks, trial.batch) if trial is not None else (len(runs[0].busy_s_by_rank), BatchLayout())
    return combine_repeats(label, ranks, runs, batch, tuple(times), means)


def _build_failed_row(trial: AnyTrial, state: MeasureState) -> FailedRow:
    reason = state["failed"].get(trial.label, "")
    short = "out of memory" if trial.label in state.get("out_of_memory", ()) else trim_reason(reason)
    return FailedRow(label=trial.label, ranks=trial.ranks, failed=short, why=reason, batch=trial.batch)


def trim_reason(reason: str) -> str:
    return reason.partition("\n")[0].partition(";")[0]


def write_measurement(found: Measurement, state: MeasureState) -> Measurement:
    """Write the file of a measurement; raise RunFailed if all of its rows failed."""
    write_json(found.file, {**state, **found.to_json()})
    if not drop_failed(found.rows) and isinstance(first := found.rows[0], FailedRow):
        raise RunFailed(f"no row could be measured; the first failed: {first.why.splitlines()[0]}")
    return found
