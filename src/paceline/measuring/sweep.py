"""The verb `measure`: one run file trained under several layouts, in turns, and what came of it in measure.json.

Repeats are interleaved, so that whatever else runs on the machine hits all rows alike. What is done is kept after each
run: a sweep that was stopped goes on where it was. A row that cannot be, or fails, becomes a cell with its reason.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

from paceline.arguments import make_folder
from paceline.errors import OutOfMemory, PacelineError, RunFailed, UserError
from paceline.layout import SPREADING, from_words, layout_of
from paceline.measuring.reading import RunTimes, read_times
from paceline.measuring.result import FORMAT, Measurement, concluded
from paceline.measuring.rows import BatchLayout, FailedRow, MeasuredRow, combined, done
from paceline.measuring.usage import Usage
from paceline.parity import PLAIN
from paceline.record.environment import environment
from paceline.record.files import from_flat, read_json, to_flat, write_json
from paceline.record.run_dir import RunDir
from paceline.record.summary import read_summary
from paceline.registry import entry_of
from paceline.spec import RunSpec, Source, spec_of
from paceline.training.run import PRELOAD, train
from paceline.workload import Say

STEPS: int = 30
REPEATS: int = 3
NEVER = 1 << 30
QUIETLY: dict[str, Any] = {
    "train.epochs": None,
    "train.loggers": [],
    "train.evaluate_every": NEVER,
    "train.checkpoint_every": NEVER,
    "train.keep": 1,
}
ALONE = {"strategy": "auto"} | {name: getattr(PLAIN, name) for name in SPREADING if name != "micro_batch"}
"""The values of one rank alone; the size of a pass stays as the run file has it."""
NOT_COMPARED = ("parallel.ranks", "train.epochs", "train.steps")
"""Keys of the spec in which the sweeps of one folder may differ."""
"""In the reason of a failure: of it nothing but its words is kept, in the file of the sweep."""


@dataclass(frozen=True)
class Trial:
    """A layout to train, which becomes a row."""

    label: str
    ranks: int
    spec: RunSpec

    def run_name(self, repeat: int) -> str:
        return f"{re.sub('[^A-Za-z0-9.]+', '-', self.label)}-{repeat + 1}"

    @property
    def batch(self) -> BatchLayout:
        layout = layout_of(self.spec)
        told = layout.equation() if layout.plain else f"{layout.grid()}; {layout.equation()}"
        return BatchLayout(told, layout.global_batch, layout.passes(layout.global_batch), layout.plain)


AnyTrial: TypeAlias = Trial | FailedRow


class SweepOptions(TypedDict, total=False):
    """What `measure` can be asked for by name."""

    layouts: Sequence[str]
    """Short forms such as "fsdp:2+tensor:2", beside the numbers of ranks."""
    weak: bool
    """Let the batch grow with the ranks."""
    repeats: int
    steps: int
    price: float | None
    """In USD per device and hour."""
    retry: bool
    """Try again what failed before."""


def measure(
    spec: Source,
    ranks: Sequence[int] = (1, 2),
    *,
    out: str | Path | None = None,
    say: Say = lambda text: None,
    **options: Unpack[SweepOptions],
) -> Measurement:
    """Train some steps on each number of ranks and each layout, several times, and sum up.

    The folder `out` (runs/NAME-measure) holds measure.json and the runs.
    """
    spec = spec_of(spec)
    steps, repeats, weak = options.get("steps", STEPS), options.get("repeats", REPEATS), options.get("weak", False)
    wanted = trials(spec, ranks, options.get("layouts", ()), steps, weak)
    folder = Path(out) if out is not None else Path("runs") / f"{spec.name}-measure"
    begun = {"format": FORMAT, "name": spec.name, "kind": "weak" if weak else "strong", "steps": steps}
    make_folder(folder)
    with RunDir(folder).held(say):
        state = _state(folder, begun, spec)
        if options.get("retry"):
            state.pop("out_of_memory", None)
            for trial in wanted:
                state["failed"].pop(trial.label, None)
        for repeat in range(repeats):
            for trial in wanted if repeat % 2 == 0 else wanted[::-1]:
                _visit(trial, repeat, repeats, folder, state, say)
        return _write(folder, wanted, state, options.get("price"))


def trials(spec: RunSpec, ranks: Sequence[int], layouts: Sequence[str], steps: int, weak: bool) -> list[AnyTrial]:
    """One for each number of ranks and each short form of a layout, fewest ranks first."""
    if weak and not entry_of(spec.workload).batched:
        raise UserError("--weak: a fit passes over all of its samples, on any number of ranks; leave --weak out")
    wanted: list[tuple[str, dict[str, Any]]] = [
        (f"{n} rank{'s' * (n > 1)}", {"ranks": n} if n > 1 else ALONE) for n in ranks
    ]
    wanted += [(word, {**ALONE, **from_words(word)}) for word in layouts]
    if min((values["ranks"] for _, values in wanted), default=0) != 1:
        given = f"--ranks {','.join(map(str, ranks))}" if ranks else f"--layouts {','.join(layouts)}"
        raise UserError(f"speed-up is counted from one rank, and {given} has none; write it as  --ranks 1,2,4")
    return sorted((_trial(spec, label, values, steps, weak) for label, values in wanted), key=lambda trial: trial.ranks)


def _trial(spec: RunSpec, label: str, parallel: dict[str, Any], steps: int, weak: bool) -> AnyTrial:
    try:
        layout = {f"parallel.{name}": value for name, value in parallel.items()}
        found = spec.replace({**QUIETLY, "train.steps": steps, **layout})
        if weak:
            batch = spec.train.global_batch * found.parallel.ranks // (found.parallel.tensor * found.parallel.pipeline)
            found = found.replace({"train.global_batch": batch})
        layout_of(found)
    except UserError as error:
        return FailedRow(label=label, ranks=int(parallel["ranks"]), failed=in_short(str(error)), why=str(error))
    return Trial(label, found.parallel.ranks, found)


def _state(folder: Path, begun: dict[str, Any], spec: RunSpec) -> dict[str, Any]:
    """What is done already; a folder that holds the measurement of something else is refused by name."""
    file = folder / "measure.json"
    values = {**begun, "spec": spec.dump(), "environment": environment(), "load": os.getloadavg()[0]}
    values |= {"done": {}, "failed": {}}
    if not file.is_file():
        return values
    old = read_json(file)
    if old.get("format") != FORMAT:
        raise UserError(f"{file} is of another version; measure into another folder with  --out FOLDER")
    before, now = (_flat(v.get("spec", {})) for v in (old, values))
    asked = [key for key in sorted({*before, *now}) if not key.startswith(NOT_COMPARED)]
    pairs = [(key, old.get(key), values[key]) for key in ("name", "kind", "steps")]
    for key, was, wanted in pairs + [(key, before.get(key), now.get(key)) for key in asked]:
        if was != wanted:
            raise UserError(
                f"{file} was begun with {key}={was}, and this is {key}={wanted}; measure into another folder "
                "with  --out FOLDER"
            )
    return {**values, **{key: old[key] for key in ("done", "failed", "out_of_memory") if key in old}}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _visit(trial: AnyTrial, repeat: int, repeats: int, folder: Path, state: dict[str, Any], say: Say) -> None:
    """Train one repeat of one layout, unless it is done or has failed before."""
    if isinstance(trial, FailedRow):
        state["failed"][trial.label] = trial.why
        return
    name = trial.run_name(repeat)
    if name in state["done"] or trial.label in state["failed"]:
        return
    say(f"{trial.label}: repeat {repeat + 1} of {repeats}")
    shutil.rmtree(folder / name, ignore_errors=True)  # of a sweep that was killed
    try:
        with Usage(trial.ranks) as usage:
            path, status = _trained_apart(trial.spec.replace({"name": name}), folder)
        if status == "stopped":
            raise KeyboardInterrupt
        times = read_times(RunDir(path))
    except PacelineError as error:
        state["failed"][trial.label] = str(error)
        if isinstance(error, OutOfMemory):
            state.setdefault("out_of_memory", []).append(trial.label)
        say(f"{trial.label}: {str(error).splitlines()[0]}")
    else:
        state["done"][name] = {"label": trial.label, "times": to_flat(times), "usage": usage_of_run(usage, times)}
        shutil.rmtree(path / "checkpoints", ignore_errors=True)
    write_json(folder / "measure.json", state)


def usage_of_run(usage: Usage, times: RunTimes) -> dict[str, float]:
    """While steps were done: starting takes longer than those of many a sweep. Devices, where the run was on them."""
    if times.began is None or times.ended is None:
        return {}
    found = usage.between(times.began, times.ended)
    return {name: value for name, value in found.items() if times.device or not name.startswith("device")}


def _trained_apart(spec: RunSpec, folder: Path) -> tuple[Path, str]:
    """Always in new processes, so that the memory of a rank is that of its run alone."""
    if spec.parallel.ranks > 1:
        return _trained(spec, folder)
    from paceline.launch.local import run_ranks

    return run_ranks(_trained, (spec, folder), 1, PRELOAD)[0]


def _trained(spec: RunSpec, folder: Path) -> tuple[Path, str]:
    result = train(spec, folder, show=False)
    return result.path, result.status


def _write(folder: Path, wanted: Sequence[AnyTrial], state: dict[str, Any], price: float | None) -> Measurement:
    """All rows that were ever measured here, with what follows from them."""
    known = {trial.label: trial for trial in wanted}
    runs: dict[str, dict[str, Any]] = {label: {} for label in known}
    for name, run in state["done"].items():
        runs.setdefault(run["label"], {})[name] = run
    times = {label: [from_flat(RunTimes, run["times"]) for run in found.values()] for label, found in runs.items()}
    rows = [
        _row(label, known.get(label), runs[label], times[label])
        if times[label]
        else _failed(known[label], state["failed"].get(label, ""), label in state.get("out_of_memory", ()))
        for label in runs
    ]
    rows.sort(key=lambda row: row.ranks)
    rates = {label: [t.samples_per_s for t in found] for label, found in times.items()}
    total = _total_samples(folder, state)
    specs = {trial.label: trial.spec for trial in wanted if isinstance(trial, Trial)}
    found = concluded(folder, state, rows, rates, total, price, specs)
    write_json(folder / "measure.json", {**state, **found.to_json()})
    if not done(rows) and isinstance(rows[0], FailedRow):
        raise RunFailed(f"no row could be measured; the first failed so: {rows[0].why.splitlines()[0]}")
    return found


def _row(label: str, trial: AnyTrial | None, runs: Mapping[str, Any], times: Sequence[RunTimes]) -> MeasuredRow:
    usage = [run["usage"] for run in runs.values() if run["usage"]]
    means = {name: math.fsum(u.get(name, 0.0) for u in usage) / len(usage) for name in (usage[0] if usage else {})}
    ranks, batch = (trial.ranks, trial.batch) if trial is not None else (len(times[0].busy_s_by_rank), BatchLayout())
    return combined(label, ranks, times, batch, tuple(runs), means)


def _failed(trial: AnyTrial, why: str, out_of_memory: bool) -> FailedRow:
    short = "out of memory" if out_of_memory else in_short(why)
    return FailedRow(label=trial.label, ranks=trial.ranks, failed=short, why=why, batch=trial.batch)


def in_short(why: str) -> str:
    """A reason in the few words that a cell has room for: up to what can be done about it."""
    return why.partition("\n")[0].partition(";")[0]


def _total_samples(folder: Path, state: dict[str, Any]) -> int | None:
    """Of the whole run that the run file asks for; the size of an epoch is known once something was trained."""
    train_section = state["spec"]["train"]
    documents = next((done["times"].get("documents") for done in state["done"].values()), None)
    if documents:
        return int(documents * (train_section.get("steps") or train_section.get("epochs") or 0)) or None
    if train_section.get("steps"):
        return int(train_section["steps"]) * int(train_section["global_batch"])
    for name in state["done"]:
        trained = read_summary(RunDir(folder / name).summary_file).trained
        if trained.epochs:
            return int((train_section.get("epochs") or 1) * round(trained.samples / trained.epochs))
    return None
