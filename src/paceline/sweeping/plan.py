"""What a sweep is asked for: a run, what varies, and how trials are chosen; checked before anything starts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from paceline.errors import UserError
from paceline.record.files import finite
from paceline.registry import entry_of
from paceline.spec import RunSpec, Source, spec_of
from paceline.sweeping.result import TrialRow
from paceline.sweeping.space import Space, drawn, grid, space_of, spec_with
from paceline.sweeping.suggesting import check_optuna
from paceline.training.extension import LENGTHS, length_of

Search = Literal["grid", "random", "optuna"]
TRIALS, FACTOR = 20, 3


class SweepChoices(TypedDict, total=False):
    """What `sweep` can be asked for by name."""

    search: Search
    trials: int
    """To draw; a grid has all of its combinations."""
    halving: bool
    jobs: int
    """Trials that are trained at once."""
    score: str
    """The metric that ranks trials, in place of the workload's own; with a leading minus, lower is better."""
    seed: int
    retry: bool
    """Try again what failed before."""


@dataclass(frozen=True, eq=False)
class SweepPlan:
    """All that a sweep depends on."""

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
        """Of the parts that trials are trained in: one, or with halving a third of a third of … the whole."""
        whole = length_of(self.spec.train)[1]
        if not self.halving:
            return [whole]
        parts = int(math.log(max(1, self.trials), FACTOR) + 1e-9)
        return sorted({max(1, round(whole / FACTOR**part)) for part in range(parts + 1)})

    def asked(self) -> dict[str, Any]:
        """As JSON has it."""
        tried = {key: str(value) for key, value in self.space.items()}
        values = {"search": self.search, "halving": self.halving, "seed": self.seed, "keys": tried}
        if self.search != "grid":
            values["trials"] = self.trials
        spec = {key: value for key, value in self.spec.dump().items() if key not in ("name", "parallel")}
        found: dict[str, Any] = json.loads(json.dumps(finite({**values, "spec": spec})))
        return found

    def spec_of(self, row: TrialRow, length: int) -> RunSpec:
        key = length_of(self.spec.train)[0]
        given = {**row.values, "name": row.run}
        if self.halving:
            given[key] = length
        return spec_with(self.spec, given)


def plan_of(
    source: Source, values: Sequence[str] | Mapping[str, Any], out: str | Path | None, choices: SweepChoices
) -> SweepPlan:
    """UserError where what is asked for cannot be."""
    space, fixed = space_of(values)
    spec = spec_with(spec_of(source), fixed)
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
        trials = len(grid(space))
    entry = entry_of(spec.workload)
    if halving and not (entry.batched or entry.extends):
        raise UserError(f"--halving: a run of {spec.workload} cannot go on for longer; leave --halving out")
    if halving and (swept := [key for key in LENGTHS if key in space]):
        raise UserError(f"--halving sets the length of each trial, and so {swept[0]} cannot vary; leave one out")
    folder = Path(out) if out is not None else Path("runs") / f"{spec.name}-sweep"
    score = choices.get("score") or str(getattr(entry.run_class(), "score", "-loss"))
    plan = SweepPlan(spec, space, folder, search, trials, halving, score, choices.get("seed", 0))
    _check_values(plan)
    return plan


def _check_values(plan: SweepPlan) -> None:
    """A key that is not known, or a value that no trial can have, is said before anything starts."""
    firsts = drawn(plan.space, plan.trials, plan.seed) if plan.search != "grid" else grid(plan.space)
    wrong: dict[tuple[str, str], str] = {}
    fine: set[tuple[str, str]] = set()
    for values in firsts:
        cells = [(key, str(value)) for key, value in values.items()]
        try:
            spec_with(plan.spec, values)
        except UserError as error:
            wrong |= {cell: str(error) for cell in cells if cell not in wrong}
        else:
            fine |= set(cells)
    for cell, why in wrong.items():
        if cell not in fine and (plan.search == "grid" or not fine):
            raise UserError(why)


def checked_jobs(jobs: int, spec: RunSpec) -> int:
    if jobs < 1:
        raise UserError(f"--jobs {jobs} is not a number of trials at once; use 1 or more")
    if jobs > 1 and spec.parallel.ranks > 1:
        raise UserError(
            f"--jobs {jobs}: each trial has parallel.ranks={spec.parallel.ranks} processes already; leave one out"
        )
    return jobs
