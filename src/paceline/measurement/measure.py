"""Measure a run file: train it for some steps under several layouts."""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import RunSpec, SpecSource, resolve_spec
from paceline.config.registry import find_entry
from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.io.files import flatten_keys
from paceline.io.format import plural
from paceline.layout import LAYOUT_FIELDS, fix_strategy, layout_of, parse_layout
from paceline.measurement.progress import (
    AnyTrial,
    MeasureState,
    MeasureTrial,
    build_rows,
    complete_runs,
    trim_reason,
    write_measurement,
)
from paceline.measurement.result import Measurement, build_measurement
from paceline.measurement.rows import BatchLayout, FailedRow
from paceline.measurement.run_times import RunTimes, read_run_times
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.trials.check import DEFAULT_PARALLEL
from paceline.trials.runner import train_trial
from paceline.workload import LogFn

STEPS: int = 30
REPEATS: int = 3
NEVER = 1 << 30
QUIET_TRAINING: dict[str, Any] = {
    "train.epochs": None,
    "train.loggers": [],
    "train.evaluate_every": NEVER,
    "train.checkpoint_every": NEVER,
    "train.keep": 1,
}
ONE_RANK = {name: getattr(DEFAULT_PARALLEL, name) for name in LAYOUT_FIELDS if name != "micro_batch"}
ONE_RANK["strategy"] = "auto"
"""The values of one rank alone; the micro-batch stays as the run file has it."""
NOT_COMPARED = ("parallel.ranks", "train.epochs", "train.steps")
"""Keys of the spec in which the measurements of one folder may differ."""


def _train_and_read(spec: RunSpec, path: Path) -> RunTimes:
    result = train_trial(spec.replace({"name": path.name}), path.parent)
    if result.status == "stopped":
        raise KeyboardInterrupt
    shutil.rmtree(result.path / "checkpoints", ignore_errors=True)
    return read_run_times(RunDir(result.path))


def measure(
    spec: SpecSource,
    ranks: Sequence[int] = (1, 2),
    *,
    layouts: Sequence[str] = (),
    weak: bool = False,
    steps: int = STEPS,
    repeats: int = REPEATS,
    price: float | None = None,
    out: str | Path | None = None,
    retry: bool = False,
    log: LogFn = lambda text: None,
) -> Measurement:
    """Train some steps on each number of ranks and each layout, several times, and sum up.

    `layouts` are short forms such as "fsdp:2+tensor:2"; `weak`: the batch grows with the ranks; `price` is in USD per
    device and hour; `retry` what failed before. The folder `out` (runs/NAME-measure) holds measure.json and the runs.
    """
    spec = resolve_spec(spec)
    trials = build_trials(spec, ranks, layouts, steps, weak)
    folder = Path(out or f"runs/{spec.name}-measure")
    request = {"name": spec.name, "kind": "weak" if weak else "strong", "steps": steps, "spec": spec.dump()}
    with complete_runs(folder, trials, repeats, request, select_comparable, retry, log) as state:
        specs = {trial.label: trial.spec for trial in trials if isinstance(trial, MeasureTrial) and trial.spec}
        rows, total = build_rows(trials, state), count_total_samples(folder, state)
        return write_measurement(build_measurement(folder, state, rows, total, price, specs), state)


def build_trials(spec: RunSpec, ranks: Sequence[int], layouts: Sequence[str], steps: int, weak: bool) -> list[AnyTrial]:
    if weak and not find_entry(spec.workload).batched:
        raise option_error("--weak", "a pass of a fit has all samples, on any number of ranks", "not-supported")
    trials = [_build_trial(spec, plural(n, "rank"), {"ranks": n} if n > 1 else ONE_RANK, steps, weak) for n in ranks]
    trials += [_build_trial(spec, word, {**ONE_RANK, **parse_layout(word)}, steps, weak) for word in layouts]
    trials.sort(key=lambda trial: trial.ranks)
    if not trials or trials[0].ranks != 1:
        raise option_error("--ranks", "speed-up is relative to one rank; use  --ranks 1,2,4", "missing-value")
    return trials


def _build_trial(spec: RunSpec, label: str, parallel: dict[str, Any], steps: int, weak: bool) -> AnyTrial:
    try:
        values = {f"parallel.{name}": value for name, value in parallel.items()}
        trial = spec.replace({**QUIET_TRAINING, "train.steps": steps, **values})
        if weak:
            trial = trial.replace({"train.global_batch": spec.train.global_batch * layout_of(trial).data})
        trial = fix_strategy(trial)
        layout = layout_of(trial)
    except UserError as error:
        return FailedRow(label=label, ranks=int(parallel["ranks"]), failed=trim_reason(str(error)), why=str(error))
    equation = layout.equation() if layout.plain else f"{layout.grid()}; {layout.equation()}"
    batch = BatchLayout(equation, layout.global_batch, layout.passes(layout.global_batch), layout.plain)
    return MeasureTrial(label, trial.parallel.ranks, partial(_train_and_read, trial), batch, trial)


def select_comparable(state: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: state.get(key) for key in ("name", "kind", "steps")}
    spec = flatten_keys(state.get("spec", {}))
    return values | {key: spec[key] for key in sorted(spec) if not key.startswith(NOT_COMPARED)}


def count_total_samples(folder: Path, state: MeasureState) -> int | None:
    """Count the samples of the whole run; the size of an epoch is known once something was trained."""
    train = state["spec"]["train"]
    steps, epochs = train.get("steps"), train.get("epochs")
    if documents := next((done["times"].get("documents") for done in state["done"].values()), None):
        return int(documents * (steps or epochs or 0)) or None
    if steps:
        return int(steps) * int(train["global_batch"])
    for name in state["done"]:
        trained = read_summary(RunDir(folder / name).summary_file).trained
        if trained.epochs:
            return int((epochs or 1) * round(trained.samples / trained.epochs))
    return None
