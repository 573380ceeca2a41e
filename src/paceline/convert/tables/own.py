"""Paceline's own run files: every key stays as it is."""

from __future__ import annotations

from typing import Any

from paceline.config import Parallel, RunSpec, Train
from paceline.convert.rules import Outcome, Rule, Ruling
from paceline.convert.sources import KeyTable


def _kept(key: str) -> Rule:
    def rule(value: Any) -> Ruling:
        return Ruling(Outcome.KEPT, {} if value is None else {key: value})

    return rule


class _Own(KeyTable):
    """Sections `model` and `data` have the keys of their workload, whatever these are."""

    def rule(self, key: str) -> Rule | None:
        section, _, _ = key.partition(".")
        return _kept(key) if key in self.rules or section in ("model", "data") else None


KEYS = (
    *(name for name in RunSpec.model_fields if name not in ("model", "data", "train", "parallel")),
    *(f"train.{name}" for name in Train.model_fields),
    *(f"parallel.{name}" for name in Parallel.model_fields),
)
OWN = _Own(
    "Paceline",
    {key: _kept(key) for key in (*KEYS, "parallel")},
    frozenset(("workload", "train", "parallel", *KEYS)) - {"name", "train"},
    ours=True,
)
