"""Runs side by side: what each was asked, and how well it did. For runs that differ in more than their layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.record.units import duration, number
from paceline.reporting.run_view import RunView

NOT_COMPARED = ("name", "data.cache")
MOST_KEYS = 5
"""That are shown as columns."""
USUAL_SCORES = ("accuracy", "dice", "-loss")
"""Of runs that did not note theirs, the first that was measured."""


@dataclass(frozen=True)
class Score:
    """The best evaluation of a run, by the metric that its workload is judged by."""

    name: str
    value: float
    step: int | None
    less_is_better: bool

    @property
    def goodness(self) -> float:
        return -self.value if self.less_is_better else self.value


def score_of(run: RunView) -> Score | None:
    """None where nothing was evaluated."""
    if run.summary is None:
        return None
    told = run.summary.evaluation
    metrics: dict[str, Any] = dict(told.best or told.metrics)
    wanted = told.score or next((name for name in USUAL_SCORES if name.removeprefix("-") in metrics), "")
    value = metrics.get(wanted.removeprefix("-"))
    if not wanted or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    step = metrics.get("step") if told.best else run.summary.trained.steps
    return Score(wanted.removeprefix("-"), float(value), step, wanted.startswith("-"))


@dataclass(frozen=True)
class Experiments:
    """Runs, the best first where they have the same score; the keys in which they differ, and each one's values."""

    runs: tuple[RunView, ...]
    scores: tuple[Score | None, ...]
    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @property
    def score(self) -> str:
        """The metric that all of them which were evaluated are judged by; empty where there is none."""
        names = {score.name for score in self.scores if score is not None}
        return names.pop() if len(names) == 1 else ""

    @property
    def best(self) -> int | None:
        """The place of the best one, where there are several to choose from."""
        known = [i for i, score in enumerate(self.scores) if score is not None]
        return known[0] if self.score and len(known) > 1 else None

    @property
    def text(self) -> str:
        """Which is best, and what it was asked; empty where that cannot be said."""
        if self.best is None:
            return ""
        first, *others = ((run, score) for run, score in zip(self.runs, self.scores, strict=True) if score is not None)
        (run, score), (second, behind) = first, others[0]
        if score.value == behind.value:
            return f"{run.name} and {second.name} have the same {self.score}, {number(score.value)}."
        asked = ", ".join(f"{k}={v}" for k, v in zip(self.keys[:MOST_KEYS], self.values[self.best], strict=False))
        extreme = "lowest" if score.less_is_better else "highest"
        of = f" of {len(others) + 1} runs" if len(others) > 1 else ""
        with_ = f" with {asked}" if asked else ""
        return (
            f"{run.name} has the {extreme} {self.score}{of}, {number(score.value)}{with_}; next is {second.name}, "
            f"{number(behind.value)}."
        )


def experiments(runs: Sequence[RunView]) -> Experiments:
    scored = [(run, score_of(run)) for run in runs]
    names = {score.name for _, score in scored if score is not None}
    if len(names) == 1:
        scored.sort(key=lambda pair: -math.inf if pair[1] is None else pair[1].goodness, reverse=True)
    asked = [{key: value for key, value, *_ in run.spec.fields()} for run, _ in scored]
    every = dict.fromkeys(key for values in asked for key in values)
    differing = [
        key for key in every if key not in NOT_COMPARED and len({str(values.get(key)) for values in asked}) > 1
    ]
    values = tuple(tuple(_shown(values.get(key)) for key in differing) for values in asked)
    return Experiments(tuple(run for run, _ in scored), tuple(score for _, score in scored), tuple(differing), values)


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def cells(found: Experiments, place: int) -> tuple[str, ...]:
    """A row: the run, what it was asked, how well it did and how long it took. Under `head`."""
    run, score, told = found.runs[place], found.scores[place], found.runs[place].summary
    return (
        run.name,
        run.status,
        *found.values[place][:MOST_KEYS],
        number(score.value) if score else "–",
        f"{score.step:,}" if score and score.step is not None else "–",
        number(told.loss_last if told else run.points[-1].loss),
        number(told.samples_per_s, 3) if told and told.samples_per_s else "–",
        duration(told.seconds) if told else "–",
    )


def head(found: Experiments) -> tuple[str, ...]:
    score = found.score or "score"
    return ("run", "status", *found.keys[:MOST_KEYS], score, "at step", "last loss", "samples/s", "took")


def more_keys(found: Experiments) -> str:
    """Those that have no column."""
    left = found.keys[MOST_KEYS:]
    return f"They also differ in {', '.join(left)}." if left else ""
