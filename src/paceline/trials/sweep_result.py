"""What came of a sweep: a row for each trial, best first; kept as sweep.json and sweep.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.io.escape import escape_cell
from paceline.io.files import read_json, validate_fields, write_atomic, write_json
from paceline.runlog.events import RunStatus
from paceline.runlog.summary import Summary, read_summary
from paceline.trials.search_space import Values

FILE, TABLE = "sweep.json", "sweep.csv"
FORMAT = 1
STATUSES = ("to do", "finished", "failed", "dropped")


@dataclass(frozen=True)
class TrialRow:
    number: int
    values: Values
    status: str = "to do"  # one of STATUSES
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
        """Best first, with halving the longest first; then rows without a score."""
        scored = [row for row in self.trials if row.score is not None]
        others = [row for row in self.trials if row.score is None]
        return [*sorted(scored, key=lambda row: (-(row.length or 0), -self.goodness(row))), *others]

    @property
    def best(self) -> TrialRow | None:
        return next((row for row in self.rows if row.score is not None), None)

    def goodness(self, row: TrialRow) -> float:
        assert row.score is not None
        if math.isnan(row.score):  # the training diverged
            return -math.inf
        return -row.score if self.score.startswith("-") else row.score

    def with_row(self, row: TrialRow) -> Sweep:
        there = {one.number: one for one in self.trials} | {row.number: row}
        return replace(self, trials=tuple(there[number] for number in sorted(there)))

    def to_json(self) -> dict[str, Any]:
        best = self.best
        facts = {"format": FORMAT, "score": self.score, "keys": self.keys, "asked": self.asked}
        trials = [{"run": row.run, **asdict(row)} for row in self.trials]
        return {**facts, "best": best.number if best is not None else None, "trials": trials}

    def write(self) -> None:
        write_json(self.folder / FILE, self.to_json())
        text = io.StringIO()
        metrics = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        table = csv.writer(text, lineterminator="\n")
        table.writerow(
            ["trial", *self.keys, self.metric, "seconds", "length", "status", "why", *map(escape_cell, metrics)]
        )
        for row in self.rows:
            values = [row.values.get(key) for key in self.keys]
            outcome = [row.score, round(row.seconds, 3), row.length, row.status, row.why]
            table.writerow(
                [row.number, *map(escape_cell, (*values, *outcome)), *(row.metrics.get(name) for name in metrics)]
            )
        write_atomic(self.folder / TABLE, text.getvalue())


def read_sweep(folder: Path) -> Sweep:
    found = read_json(folder / FILE)
    try:
        if found["format"] != FORMAT:
            raise UserError(f"{folder / FILE} is of another version; sweep into another folder with  --out FOLDER")
        named = {name: found[name] for name in ("score", "keys", "asked")}
        rows = tuple(_parse_row(number, dict(one), named["keys"]) for number, one in enumerate(found["trials"], 1))
        return Sweep(folder, **validate_fields(Sweep, named), trials=rows)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / FILE} is damaged ({error}); sweep into another folder with  --out FOLDER") from None


def _parse_row(number: int, facts: dict[str, Any], keys: Sequence[str]) -> TrialRow:
    """A score that is not finite is null in the file."""
    facts["history"] = [(at, math.nan if score is None else score) for at, score in facts["history"]]
    row = TrialRow(**validate_fields(TrialRow, {name: value for name, value in facts.items() if name != "run"}))
    if row.number != number or row.status not in STATUSES or not set(keys) <= set(row.values):
        raise ValueError(f"trial {number} is invalid")
    return row


def score_trial(row: TrialRow, summary: Summary, metric: str, length: int, best: bool) -> TrialRow:
    """Return the row of a finished trial; `best` takes the best evaluation in place of the last."""
    held_out, final = summary.evaluation, dict(summary.evaluation.metrics)
    if best and held_out.best is not None:
        final |= {name: value for name, value in held_out.best.items() if name in final}
    if not final and metric == "loss" and summary.loss_last is not None:
        final = {"loss": summary.loss_last}
    if metric not in final:
        there = f"it has {', '.join(final)}" if final else "nothing was held out to evaluate on"
        raise UserError(f"--score {metric}: {there}")
    score = float(final[metric])
    kept = tuple(one for one in row.history if one[0] != length)
    return replace(
        row,
        status=str(RunStatus.FINISHED),
        score=score,
        seconds=summary.seconds,
        length=length,
        why="",
        metrics={name: float(value) for name, value in final.items() if isinstance(value, int | float)},
        history=(*kept, (length, score)),
    )


def read_run_summary(run: Path) -> Summary:
    return read_summary(run / "summary.json")


def format_values(row: TrialRow, keys: Sequence[str]) -> str:
    return " ".join(f"{key}={_format_value(row.values[key])}" for key in keys if key in row.values)


def _format_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")
