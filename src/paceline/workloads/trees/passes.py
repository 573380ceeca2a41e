"""The rounds of a run as the loop of fits wants them: one pass over all rows each, evaluated now and then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.passes import FitEnd
from paceline.spec import Train
from paceline.training.explain import shared
from paceline.workloads.trees.fitted import FittedTrees, cut_model
from paceline.workloads.trees.own_metric import own_metric
from paceline.workloads.trees.rounds import Boosting, library_of
from paceline.workloads.trees.scoring import HeldOutRows

EVALUATED_EVERY = 10
"""Rounds, where the run file does not say."""


class TreePasses:
    """One rank's part."""

    def __init__(self, boosting: Boosting, train: Train) -> None:
        self.boosting, self.train, self.place = boosting, train, boosting.place
        self.samples = boosting.table.facts.rows
        self.most = train.steps or train.epochs or 0
        self.parameters = None
        self.done = self.stale = self.best_round = 0
        self.best: float | None = None
        self.rounds = library_of(boosting.model.library)(boosting)
        test = boosting.table.split("test")
        self.held_out = HeldOutRows.of(test, boosting.target, self.place.rank, self.place.world)
        self.rounds.hold(test.X[self.held_out.rows])
        self.metric = own_metric(boosting.model.metric)
        self.notes: list[str] = []
        """What else is said before the first round."""
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def end(self) -> FitEnd | None:
        if self.train.patience and self.stale >= self.train.patience:
            return FitEnd.PATIENCE
        return FitEnd.AS_ASKED if self.done >= self.most else None

    def end_words(self) -> str:
        if self.end is FitEnd.PATIENCE:
            patience = f"{self.stale} evaluations without a lower loss (train.patience={self.train.patience})"
            return f"{patience}; the best was after round {self.best_round}, and no tree after it is used"
        return f"all of its {self.most} rounds"

    def begin(self) -> None:
        self.rounds.join()

    def close(self) -> None:
        self.rounds.leave()

    def step(self, flag: bool) -> dict[str, Any]:
        began, ran = perf_counter(), thread_time()
        self.rounds.make(self.done)
        self.done += 1
        found: dict[str, Any] = {}
        if self.done in (1, self.most) or self.done % self.train.log_every == 0:
            found["loss"] = self.rounds.loss()
        stopping = self.rounds.any(flag)
        step_s = perf_counter() - began
        waited = max(0.0, step_s - (thread_time() - ran)) if self.place.world > 1 else 0.0
        times = {"step_s": step_s, "data_s": 0.0, "comm_s": waited, "exposed_s": waited}
        return {**found, **times, "flagged": stopping, "of_samples": self.most * self.samples}

    def evaluate(self) -> dict[str, Any]:
        due = self.done == self.most or self.done % (self.train.evaluate_every or EVALUATED_EVERY) == 0
        if not due or not len(self.held_out.split):
            return {}
        margins = self.rounds.margins()
        metrics = self.held_out.metrics(margins)
        if self.metric is not None:
            metrics[self.metric.name] = self.metric.of(self.held_out, margins)
        better = self.best is None or metrics["loss"] < self.best
        if better:
            self.best, self.best_round, self.stale = metrics["loss"], self.done, 0
        else:
            self.stale += 1
        return metrics

    def tensors(self) -> dict[str, Any]:
        raw = np.frombuffer(self.rounds.raw(), np.uint8)
        return {"model": {"trees": torch.from_numpy(raw.copy())}}

    def meta(self) -> dict[str, Any]:
        told = ("done", "stale", "best", "best_round")
        return {**{name: getattr(self, name) for name in told}, "bytes": len(self.rounds.raw())}

    def room(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        self._tensor = torch.empty(meta["bytes"], dtype=torch.uint8)
        return {"model": {"trees": self._tensor}}

    def restored(self, meta: Mapping[str, Any]) -> None:
        for name in ("done", "stale", "best", "best_round"):
            setattr(self, name, meta[name])
        self.rounds.load(self._tensor.numpy().tobytes(), self.done)

    def equations(self, ranks: int) -> list[str]:
        boosting, facts, target = self.boosting, self.boosting.table.facts, self.boosting.target
        what = f"{len(target.classes)} classes" if target.classes else target.objective.task.value
        on = f"{boosting.threads} thread{'s' * (boosting.threads > 1)} per rank"
        if boosting.device != "cpu":
            on = f"a CUDA device and {on}"
        lines = [
            shared(self.samples, ranks, "rows"),
            f"{len(facts.columns)} columns, {len(facts.categories)} of them of names; {what}",
            f"{boosting.model.library}, {on}",
        ]
        if facts.test_rows:
            every = self.train.evaluate_every or EVALUATED_EVERY
            lines.append(f"evaluated on {facts.test_rows:,} held-out rows after every {every} rounds")
        return [*lines, *self.notes]

    def conclude(self, result: Mapping[str, Tensor], folder: Path) -> None:
        rounds = self.best_round if self.end is FitEnd.PATIENCE else self.done
        raw = cut_model(self.boosting.model.library, result["trees"].numpy().tobytes(), rounds)
        FittedTrees(self.boosting.model.library, raw, self.boosting.table.facts, self.boosting.target).write(folder)
