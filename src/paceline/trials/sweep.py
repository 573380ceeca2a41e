"""Sweep: train a run file with several values of its keys, several at once if asked, and rank the trials."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from paceline.api import RunResult
from paceline.config import RunSpec, SpecSource, resolve_spec
from paceline.config.registry import find_entry
from paceline.config.run_file import rename_old_keys
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.io.arguments import make_output_folder
from paceline.io.files import replace_nonfinite
from paceline.runlog.events import RunStatus
from paceline.runlog.run_dir import RunDir
from paceline.trainer.resume_guard import LENGTHS, length_of
from paceline.trials.runner import check_same_request, flatten_values, run_trials, train_trial
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
from paceline.trials.sweep_result import FILE, Sweep, TrialRow, format_values, read_run_summary, read_sweep, score_trial
from paceline.workload import LogFn

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
        """Lengths of the parts of a trial: one, or with halving a third of a third of … the whole."""
        whole = length_of(self.spec.train)[1]
        if not self.halving:
            return [whole]
        parts = int(math.log(max(1, self.trials), FACTOR) + 1e-9)
        return sorted({max(1, round(whole / FACTOR**part)) for part in range(parts + 1)})

    def asked(self) -> dict[str, Any]:
        tried = {key: str(value) for key, value in self.space.items()}
        values = {"search": self.search, "halving": self.halving, "seed": self.seed, "keys": tried}
        if self.search != "grid":
            values["trials"] = self.trials
        spec = {key: value for key, value in self.spec.dump().items() if key not in ("name", "parallel")}
        found: dict[str, Any] = json.loads(json.dumps(replace_nonfinite({**values, "spec": spec})))
        return found

    def spec_of(self, row: TrialRow, length: int) -> RunSpec:
        key = length_of(self.spec.train)[0]
        given = {**row.values, "name": row.run}
        if self.halving:
            given[key] = length
        return apply_values(self.spec, given)


def build_sweep_plan(
    source: SpecSource, values: Sequence[str] | Mapping[str, Any], out: str | Path | None, choices: SweepOptions
) -> SweepPlan:
    space, fixed = parse_space(values)
    spec = apply_values(resolve_spec(source), fixed)
    search, halving = choices.get("search", "grid"), choices.get("halving", False)
    if search == "optuna":
        check_optuna()
        if halving:
            raise UserError("--optuna learns from whole trials, and --halving ends most of them early; leave one out")
    trials = choices.get("trials", TRIALS)
    if trials < 1:
        raise UserError(f"--trials {trials} is not a number of trials; use 1 or more")
    if search == "grid":
        if "trials" in choices:
            raise UserError("--trials says how many to draw; add --random, or leave it out to try all combinations")
        trials = len(enumerate_grid(space))
    entry = find_entry(spec.workload)
    if halving and not (entry.batched or entry.extends):
        raise UserError(f"--halving: a run of {spec.workload} cannot be extended; leave --halving out")
    if halving and (swept := [key for key in LENGTHS if key in space]):
        raise UserError(f"--halving sets the length of each trial, and so {swept[0]} cannot vary; leave one out")
    folder = Path(out) if out is not None else Path("runs") / f"{spec.name}-sweep"
    score = choices.get("score") or str(getattr(entry.run_class(), "score", "-loss"))
    plan = SweepPlan(spec, space, folder, search, trials, halving, score, choices.get("seed", 0))
    _check_values(plan)
    return plan


def _check_values(plan: SweepPlan) -> None:
    """Raise UserError for an unknown key, or a value that no trial can have."""
    firsts = sample_trials(plan.space, plan.trials, plan.seed) if plan.search != "grid" else enumerate_grid(plan.space)
    wrong: dict[tuple[str, str], str] = {}
    fine: set[tuple[str, str]] = set()
    for values in firsts:
        cells = [(key, str(value)) for key, value in values.items()]
        try:
            apply_values(plan.spec, values)
        except UserError as error:
            wrong |= {cell: str(error) for cell in cells if cell not in wrong}
        else:
            fine |= set(cells)
    for cell, why in wrong.items():
        if cell not in fine and (plan.search == "grid" or not fine):
            raise UserError(why)


def check_jobs(jobs: int, spec: RunSpec) -> int:
    if jobs < 1:
        raise UserError(f"--jobs {jobs} is not a number of trials at once; use 1 or more")
    if jobs > 1 and spec.parallel.ranks > 1:
        raise UserError(
            f"--jobs {jobs}: each trial has parallel.ranks={spec.parallel.ranks} processes already; leave one out"
        )
    return jobs


def run_sweep_trials(plan: SweepPlan, options: SweepOptions, log: LogFn, publish: Callable[[Sweep], None]) -> Sweep:
    """Train the trials of a sweep that are left, and `publish` the result while nobody else has the folder."""
    jobs = check_jobs(options.get("jobs", 1), plan.spec)
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
    file = plan.folder / FILE
    if not file.exists():
        listed: list[Values] = []
        if plan.search != "optuna":
            listed = (
                enumerate_grid(plan.space)
                if plan.search == "grid"
                else sample_trials(plan.space, plan.trials, plan.seed)
            )
        rows = tuple(TrialRow(number, values) for number, values in enumerate(listed, 1))
        found = Sweep(plan.folder, plan.score, tuple(plan.space), rows, plan.asked())
        found.write()
        return found
    found = read_sweep(plan.folder)
    recorded = {**found.asked, "spec": rename_old_keys(found.asked.get("spec", {}))}
    check_same_request(file, flatten_values(recorded), flatten_values(plan.asked()), "sweep")
    fresh = [TrialRow(row.number, row.values) if retry and row.status == "failed" else row for row in found.trials]
    return replace(found, score=plan.score, trials=tuple(_refresh_row(plan, row) for row in fresh))


def _refresh_row(plan: SweepPlan, row: TrialRow) -> TrialRow:
    """Update a row that another process has trained: a job of an array, or a killed sweep."""
    if row.done or plan.halving or not (plan.folder / row.run / "summary.json").is_file():
        return row
    with suppress(UserError):
        if read_run_summary(plan.folder / row.run).status == RunStatus.FINISHED:
            return read_outcome(plan, row, plan.lengths[-1])
    return row


def _run_all(plan: SweepPlan, begun: Sweep, jobs: int, log: LogFn) -> Sweep:
    whole = plan.lengths[-1]
    if plan.search != "optuna":
        return _run_batch(plan, begun, [row for row in begun.trials if not row.done], whole, jobs, log)
    found = begun
    while (left := plan.trials - sum(row.done for row in found.trials)) > 0:
        waiting = [row for row in found.trials if not row.done]
        for number in range(len(found.trials) + 1, len(found.trials) + 1 + min(jobs, left) - len(waiting)):
            before = [(row.values, None if row.score is None else found.goodness(row)) for row in found.trials]
            row = TrialRow(number, suggest_values(plan.space, before, plan.seed))
            found = found.with_row(row)
            waiting.append(row)
        found.write()
        found = _run_batch(plan, found, waiting, whole, jobs, log)
    return found


def _run_halving(plan: SweepPlan, begun: Sweep, jobs: int, log: LogFn) -> Sweep:
    found = begun
    for part, length in enumerate(plan.lengths):
        left = [row for row in found.trials if row.status not in ("failed", "dropped")]
        log(f"{len(left)} trial{'s' * (len(left) != 1)}, {length_of(plan.spec.train)[0]}={length}")
        there = [row for row in left if length not in dict(row.history)]
        found = _run_batch(plan, found, there, length, jobs, log)
        if part + 1 == len(plan.lengths):
            break
        at = {row.number: dict(row.history)[length] for row in found.trials if length in dict(row.history)}
        down = found.score.startswith("-")
        order = sorted(at, key=lambda number: (math.isnan(at[number]), at[number] if down else -at[number], number))
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


def read_outcome(plan: SweepPlan, row: TrialRow, length: int) -> TrialRow:
    metric, best = plan.score.removeprefix("-"), plan.spec.train.patience > 0
    return score_trial(row, read_run_summary(plan.folder / row.run), metric, length, best)
