"""Fits by passes: a step reads all data once, and ranks divide nothing but its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.hardware.catalogue import Cluster
from paceline.layout import Layout
from paceline.planning.candidates import Family, Limits, Refusal, Refused
from paceline.planning.subject import Subject, Wording
from paceline.spec import RunSpec


def rows_layout(rows: int, ranks: int) -> Layout:
    """A rank has the next part of the rows, and passes over it whole."""
    return Layout("ddp" if ranks > 1 else "single", ranks, rows, -(-rows // ranks))


def rows_per_rank(layout: Layout) -> int:
    """Of the fullest rank."""
    return -(-layout.global_batch // layout.data)


@dataclass(frozen=True, kw_only=True)
class PassSubject(Subject):
    """A fit whose step is a pass over all rows; `global_batch` is their number."""

    wording: ClassVar[Wording] = Wording(step="pass", total="fit", durations=True, several_layouts=False)
    model: ClassVar[str]
    """What is fitted, with its article."""

    def limits(self, spec: RunSpec) -> Limits:
        return Limits()

    def layout(self, spec: RunSpec) -> Layout:
        return rows_layout(self.global_batch, spec.parallel.ranks)

    def families(self, devices: int, cluster: Cluster, limits: Limits) -> Iterator[Family | Refused]:
        if devices > self.global_batch:
            facts = {"batch": self.global_batch}
            yield Refused(devices, f"{devices} data-parallel ranks", Refusal.NO_SAMPLE, facts)
        else:
            yield Family(rows_layout(self.global_batch, devices))

    def members(self, family: Family, limits: Limits, offload: bool) -> Iterator[list[Layout]]:
        if not offload:
            yield [family.base]

    def overrides(self, layout: Layout) -> dict[str, Any]:
        return {"parallel.ranks": layout.ranks}

    def why_not_under(self, engine: str) -> str:
        return f"{self.model} has no gradients for {engine} to send"
