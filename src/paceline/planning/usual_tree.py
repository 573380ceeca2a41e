"""The well-known decision tree: fits on one device, ddp; does not, fsdp; many devices, pipeline and tensor.

The search asks it too, takes its word between layouts that are equally fast, and says whether it agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.layout import Layout
from paceline.planning.candidates import Refused, family_name
from paceline.planning.price import Price
from paceline.record.units import duration, size

NODE = 8
"""Devices beyond which the tree goes from sharding to pipeline and tensor."""
LONGER = {
    "compute_s": "computes",
    "exposed_s": "waits for its links",
    "bubble_s": "has an idle pipeline",
    "update_s": "updates",
    "overhead_s": "launches",
    "offload_s": "moves states to the host",
    "data_s": "waits for data",
}
"""What a layout does in each term of its step."""


class Kind(Enum):
    """Of a layout, as far as the tree tells them apart."""

    WHOLE = "whole"
    SHARDED = "sharded"
    SPLIT = "split"


class Leaf(Enum):
    """What the tree says."""

    ONE = "fits on one device"
    DDP = "fits on one device → ddp"
    FSDP = "does not fit on one device → fsdp"
    SPLIT = "does not fit, many devices → pipeline + tensor"

    @property
    def kind(self) -> Kind:
        return {Leaf.FSDP: Kind.SHARDED, Leaf.SPLIT: Kind.SPLIT}.get(self, Kind.WHOLE)


def kind_of(layout: Layout) -> Kind:
    if layout.tensor * layout.pipeline > 1:
        return Kind.SPLIT
    return Kind.WHOLE if layout.plain else Kind.SHARDED


def leaf_of(fits_whole: bool, devices: int) -> Leaf:
    if fits_whole:
        return Leaf.DDP if devices > 1 else Leaf.ONE
    return Leaf.FSDP if devices <= NODE else Leaf.SPLIT


@dataclass(frozen=True)
class Verdict:
    """The choice beside the tree's: whether they agree and, if not, what speaks against the tree's."""

    leaf: Leaf
    chosen: Price
    other: Price | None = None
    """What the tree would take instead, where it fits: its best or, where both are of one kind, plain fsdp."""
    refused: Refused | None = None
    """Why the model cannot be divided as the tree says."""

    @property
    def agrees(self) -> bool:
        return kind_of(self.chosen.layout) is self.leaf.kind

    def words(self) -> str:
        name, other, says = family_name(self.chosen.layout), self.other, self.leaf.value
        if self.agrees:
            faster = f" Of that kind, {name} is {other.step_s / self.chosen.step_s:.2f}× as fast." if other else ""
            return f"The usual tree agrees: {says}.{faster}"
        if other is None:
            why = f": {self.refused.family}: {self.refused.reason}" if self.refused else ", which does not fit here"
            return f"The usual tree says: {says}{why}. {name} it is."
        if other.tight and not self.chosen.tight:
            room = f"{size(other.memory.total_bytes)} of {size(other.capacity_bytes)}"
            return f"The usual tree says: {says}. Here that leaves no room for error ({room}), and {name} does."
        return (
            f"The usual tree says: {says}. Here {name} is {other.step_s / self.chosen.step_s:.2f}× as fast as "
            f"{family_name(other.layout)}: {self._why(other)}."
        )

    def _why(self, other: Price) -> str:
        """The term of the step in which the other layout loses most."""
        gaps = {term: getattr(other.time, term) - getattr(self.chosen.time, term) for term in LONGER}
        term = max(gaps, key=lambda t: gaps[t])
        return f"the latter {LONGER[term]} {duration(gaps[term])} longer per step"


def verdict(leaf: Leaf, chosen: Price, best: Sequence[Price], refused: Sequence[Refused]) -> Verdict:
    theirs = [p for p in best if kind_of(p.layout) is leaf.kind]
    if kind_of(chosen.layout) is leaf.kind:
        plain = [p for p in theirs if family_name(p.layout) == "fsdp" and not p.tight]
        beaten = leaf is Leaf.FSDP and chosen.layout.strategy != "fsdp" and plain
        return Verdict(leaf, chosen, plain[0] if beaten else None)
    if theirs:
        return Verdict(leaf, chosen, min(theirs, key=lambda p: (p.tight, p.step_s)))
    divided = next((r for r in refused if r.axes), None)
    return Verdict(leaf, chosen, refused=divided if leaf is Leaf.SPLIT else None)
