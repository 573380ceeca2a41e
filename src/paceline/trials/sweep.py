"""Sweep: train a run file with several values of its keys, and rank the trials; kept as sweep.json and sweep.csv."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from paceline.api import RunResult
from paceline.config import RunSpec, SpecSource, resolve_spec
from paceline.config.registry import find_entry
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.io.arguments import make_output_folder
from paceline.io.files import (
    catch_damage,
    flatten_keys,
    read_json,
    replace_nonfinite,
    validate_fields,
    write_atomic,
    write_json,
)
from paceline.io.table import format_csv
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.trainer.resume_guard import LENGTHS, length_of
from paceline.trials.runner import check_same_request, run_trials, train_trial
from paceline.trials.search_space import (
    Space,
    Values,
    apply_values,
    check_optuna,
    enumerate_grid,
    parse_space,
    sample_trials,
    suggest_values,
)
from paceline.workload import LogFn

FILE, TABLE = "sweep.json", "sweep.csv"
FORMAT = 1


@dataclass(frozen=True)
class TrialRow:
    number: int
    values: Values
    status: Literal["to do", "finished", "failed", "dropped"] = "to do"
    score: float | None = None
    seconds: float = 0.0
    length: int | None = None  # in the unit of the run file
    why: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    history: tuple[tuple[int, float], ...] = ()  # (length, score) of each part

    @property
    def run(self) -> str:
        return f"trial-{self.number:03d}"

    @property
    def done(self) -> bool:
        return self.status != "to do"


@dataclass(frozen=True)
class Sweep:
    folder: Path
    score: str  # a leading minus: lower is better
    keys: tuple[str, ...]
    trials: tuple[TrialRow, ...]
    asked: dict[str, Any] = field(default_factory=dict)  # must be the same to resume

    @property
    def metric(self) -> str:
        return self.score.removeprefix("-")

    @property
    def rows(self) -> list[TrialRow]:
        """Return rows, the best first, with halving the longest first; then rows without a score."""
        scored = [row for row in self.trials if row.score is not None]
        others = [row for row in self.trials if row.score is None]
        return [*sorted(scored, key=lambda row: (-(row.length or 0), -self.goodness(row.score or 0.0))), *others]

    @property
    def best(self) -> TrialRow | None:
        return next((row for row in self.rows if row.score is not None), None)

    def goodness(self, score: float) -> float:
        if math.isnan(score):  # the training diverged
            return -math.inf
        return -score if self.score.startswith("-") else score

    def with_row(self, row: TrialRow) -> "Sweep":
        trials = {trial.number: trial for trial in self.trials} | {row.number: row}
        return replace(self, trials=tuple(trials[number] for number in sorted(trials)))

    def to_json(self) -> dict[str, Any]:
        facts = {"format": FORMAT, "score": self.score, "keys": self.keys, "asked": self.asked}
        trials = [{"run": row.run, **asdict(row)} for row in self.trials]
        return {**facts, "best": self.best and self.best.number, "trials": trials}

    def write(self) -> None:
        write_json(self.folder / FILE, self.to_json())
        metrics = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        lines: list[list[Any]] = [["trial", *self.keys, self.metric, "seconds", "length", "status", "why", *metrics]]
        for row in self.rows:
            outcome = (row.score, round(row.seconds, 3), row.length, row.status, row.why)
            lines.append([row.number, *map(row.values.get, self.keys), *outcome, *map(row.metrics.get, metrics)])
        write_atomic(self.folder / TABLE, format_csv(lines))


def _parse_row(number: int, facts: dict[str, Any], keys: Sequence[str]) -> TrialRow:
    """Parse a row of sweep.json. A score that is not finite is null in the file."""
    facts["history"] = [(at, math.nan if score is None else score) for at, score in facts["history"]]
    row = TrialRow(**validate_fields(TrialRow, {name: value for name, value in facts.items() if name != "run"}))
    if row.number != number or not set(keys) <= set(row.values):
        raise ValueError(f"trial {number} is invalid")
    return row


def read_outcome(plan: "SweepPlan", row: TrialRow, length: int) -> TrialRow:
    """Return the row of a finished trial, with its best evaluation, as reports and `runs --compare` have it."""
    summary, metric = read_summary(plan.folder / row.run / "summary.json"), plan.score.removeprefix("-")
    evaluation, final = summary.evaluation, dict(summary.evaluation.metrics)
    if evaluation.best is not None:
        final |= {name: value for name, value in evaluation.best.items() if name in final}
    if not final and metric == "loss" and summary.loss_last is not None:
        final = {"loss": summary.loss_last}
    if metric not in final:
        raise UserError(f"--score {metric}: the held-out samples have {', '.join(final) or 'no metrics'}")
    score = float(final[metric])
    earlier = (part for part in row.history if part[0] != length)
    return replace(
        row,
        status="finished",
        score=score,
        seconds=summary.seconds,
        length=length,
        why="",
        metrics={name: float(value) for name, value in final.items() if isinstance(value, int | float)},
        history=(*earlier, (length, score)),
    )


def format_values(row: TrialRow, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={_format_value(row.values[key])}" for key in keys if key in row.values)


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


Search = Literal["grid", "random", "optuna"]
TRIALS, FACTOR = 20, 3


class SweepOptions(TypedDict, total=False):
    search: Search
    trials: int  # to draw, unless it is a grid
    halving: bool
    jobs: int
    score: str  # a leading minus: lower is better
    seed: int
    retry: bool


@dataclass(frozen=True, eq=False)
class SweepPlan:
    spec: RunSpec
    space: Space
    folder: Path
    search: Search
    trials: int
    halving: bool
    score: str
    seed: int

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of the parts of a trial: one, or with halving a third of a third of … the whole."""
        whole = length_of(self.spec.train)[1]
        parts = int(math.log(max(1, self.trials), FACTOR) + 1e-9) if self.halving else 0
        return sorted({max(1, round(whole / FACTOR**part)) for part in range(parts + 1)})

    def draw(self) -> list[Values]:
        """Return the values of the trials that are known before the first one is trained."""
        drawn = self.search != "grid"
        return sample_trials(self.space, self.trials, self.seed) if drawn else enumerate_grid(self.space)

    def asked(self) -> dict[str, Any]:
        keys = {key: str(value) for key, value in self.space.items()}
        values = {"search": self.search, "halving": self.halving, "seed": self.seed, "keys": keys}
        values |= {} if self.search == "grid" else {"trials": self.trials}
        spec = {key: value for key, value in self.spec.dump().items() if key not in ("name", "parallel")}
        return dict(json.loads(json.dumps(replace_nonfinite({**values, "spec": spec}))))

    def spec_of(self, row: TrialRow, length: int) -> RunSpec:
        part = {length_of(self.spec.train)[0]: length} if self.halving else {}
        return apply_values(self.spec, {**row.values, "name": row.run, **part})


def build_sweep_plan(
    source: SpecSource, values: Sequence[str] | Mapping[str, Any], out: str | Path | None, choices: SweepOptions
) -> SweepPlan:
    space, fixed = parse_space(values)
    spec = apply_values(resolve_spec(source), fixed)
    search, halving = choices.get("search", "grid"), choices.get("halving", False)
    if search == "optuna":
        check_optuna()
        if halving:
            raise UserError("--optuna learns from whole trials, not from halved ones; leave one out")
    trials = choices.get("trials", TRIALS)
    if trials < 1:
        raise UserError(f"--trials {trials} is not a number of trials; use 1 or more")
    if search == "grid":
        if "trials" in choices:
            raise UserError("--trials is for trials that are drawn; add --random, or leave it out")
        trials = len(enumerate_grid(space))
    entry = find_entry(spec.workload)
    if halving and not (entry.batched or entry.extends):
        raise UserError(f"--halving: a run of {spec.workload} cannot be extended; leave it out")
    if halving and (swept := [key for key in LENGTHS if key in space]):
        raise UserError(f"--halving sets the length, so {swept[0]} cannot vary; leave one out")
    folder = Path(out) if out is not None else Path("runs") / f"{spec.name}-sweep"
    score = choices.get("score") or str(getattr(entry.run_class(), "score", "-loss"))
    plan = SweepPlan(spec, space, folder, search, trials, halving, score, choices.get("seed", 0))
    _check_values(plan)
    return plan


def _check_values(plan: SweepPlan) -> None:
    """Raise UserError for an unknown key, or a value that no trial can have."""
    wrong: dict[tuple[str, str], str] = {}
    fine: set[tuple[str, str]] = set()
    for values in plan.draw():
        cells = [(key, str(value)) for key, value in values.items()]
        try:
            apply_values(plan.spec, values)
        except UserError as error:
            wrong = dict.fromkeys(cells, str(error)) | wrong
        else:
            fine |= set(cells)
    for cell, why in wrong.items():
        if cell not in fine and (plan.search == "grid" or not fine):
            raise UserError(why)


def run_sweep_trials(plan: SweepPlan, options: SweepOptions, log: LogFn, publish: Callable[[Sweep], None]) -> Sweep:
    """Train the trials of a sweep that are left, and `publish` the result while nobody else has the folder."""
    jobs, ranks = options.get("jobs", 1), plan.spec.parallel.ranks
    if jobs < 1:
        raise UserError(f"--jobs {jobs} is not possible; use 1 or more")
    if jobs > 1 and ranks > 1:
        raise UserError(f"--jobs {jobs}: each trial has {ranks} ranks already; leave one out")
    make_output_folder(plan.folder)
    with RunDir(plan.folder).lock(log):
        begun = open_sweep(plan, retry=options.get("retry", False))
        found = _run_halving(plan, begun, jobs, log) if plan.halving else _run_all(plan, begun, jobs, log)
        publish(found)
    if found.best is None:
        raise RunFailed(f"no trial finished; the first failed: {found.trials[0].why.splitlines()[0]}")
    return found


def open_sweep(plan: SweepPlan, retry: bool = False) -> Sweep:
    """Return the sweep of the folder, or a new one; raise UserError if it is another."""
    file, asked = plan.folder / FILE, plan.asked()
    found = Sweep(plan.folder, plan.score, tuple(plan.space), (), asked)
    if not file.exists():
        drawn = [] if plan.search == "optuna" else plan.draw()
        found = replace(found, trials=tuple(TrialRow(number, values) for number, values in enumerate(drawn, 1)))
        found.write()
        return found
    saved = read_json(file)
    with catch_damage(file, "sweep into another folder with  --out FOLDER"):
        if saved["format"] != FORMAT:
            raise ValueError("it is of another version")
        before = flatten_keys(validate_fields(Sweep, {"asked": saved["asked"]})["asked"])
        rows = [_parse_row(number, dict(row), found.keys) for number, row in enumerate(saved["trials"], 1)]
    check_same_request(file, before, flatten_keys(asked), "sweep")
    fresh = [TrialRow(row.number, row.values) if retry and row.status == "failed" else row for row in rows]
    return replace(found, trials=tuple(_refresh_row(plan, row) for row in fresh))


def _refresh_row(plan: SweepPlan, row: TrialRow) -> TrialRow:
    """Update a row that another process has trained: a job of an array, or a killed sweep."""
    if row.done or plan.halving or not (plan.folder / row.run / "summary.json").is_file():
        return row
    with suppress(UserError):
        if read_summary(plan.folder / row.run / "summary.json").status == RunStatus.FINISHED:
            return read_outcome(plan, row, plan.lengths[-1])
    return row


def _run_all(plan: SweepPlan, begun: Sweep, jobs: int, log: LogFn) -> Sweep:
    whole = plan.lengths[-1]
    if plan.search != "optuna":
        return _run_batch(plan, begun, [row for row in begun.trials if not row.done], whole, jobs, log)
    found = begun
    while (left := plan.trials - sum(row.done for row in found.trials)) > 0:
        waiting = [row for row in found.trials if not row.done]
        while len(waiting) < min(jobs, left):
            scores = [(row.values, row.score) for row in found.trials]
            before = [(values, None if score is None else found.goodness(score)) for values, score in scores]
            waiting.append(TrialRow(len(found.trials) + 1, suggest_values(plan.space, before, plan.seed)))
            found = found.with_row(waiting[-1])
        found.write()
        found = _run_batch(plan, found, waiting, whole, jobs, log)
    return found


def _run_halving(plan: SweepPlan, begun: Sweep, jobs: int, log: LogFn) -> Sweep:
    found = begun
    for part, length in enumerate(plan.lengths):
        left = [row for row in found.trials if row.status not in ("failed", "dropped")]
        log(f"{len(left)} trial{'s' * (len(left) != 1)}, {length_of(plan.spec.train)[0]}={length}")
        shorter = [row for row in left if length not in dict(row.history)]
        found = _run_batch(plan, found, shorter, length, jobs, log)
        if part + 1 == len(plan.lengths):
            break
        at = {row.number: dict(row.history)[length] for row in found.trials if length in dict(row.history)}
        order = sorted(at, key=lambda number: (-found.goodness(at[number]), number))
        for number in order[math.ceil(len(order) / FACTOR) :]:
            found = found.with_row(replace(found.trials[number - 1], status="dropped"))
        found.write()
    return found


def _run_batch(plan: SweepPlan, found: Sweep, rows: Sequence[TrialRow], length: int, jobs: int, log: LogFn) -> Sweep:
    def run(row: TrialRow, slot: int) -> RunResult:
        spec = plan.spec_of(row, length)
        if jobs > 1 and not spec.parallel.threads:
            spec = spec.replace({"parallel.threads": max(1, len(os.sched_getaffinity(0)) // jobs)})
        return train_trial(spec, plan.folder, again=True, slot=slot if jobs > 1 else None)

    def record(row: TrialRow, result: RunResult | PacelineError) -> None:
        nonlocal found
        if isinstance(result, PacelineError):
            row = replace(row, status="failed", why=str(result), score=None)
            outcome = f"failed: {row.why.splitlines()[0]}"
        elif result.status == RunStatus.STOPPED:
            raise KeyboardInterrupt
        else:
            row = read_outcome(plan, row, length)
            outcome = f"{found.metric} {row.score:.5g}"
        found = found.with_row(row)
        found.write()
        log(f"trial {row.number}: {format_values(row, found.keys)}: {outcome}")

    run_trials(rows, run, record, jobs)
    return found
