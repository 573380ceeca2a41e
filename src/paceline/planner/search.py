"""The search: on each number of devices, the fastest layout that fits, the runners-up, and why the rest is out.

Of layouts that are equally fast, those of the well-known decision tree (fits on one device: ddp; does not: fsdp; many
devices: pipeline and tensor) come first, then the simpler ones. Whether the tree agrees is said.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.io.format import duration, size
from paceline.layout import Layout
from paceline.planner.candidates import (
    LayoutConstraints,
    LayoutFamily,
    PricedLayout,
    RejectedFamily,
    RejectReason,
    family_name,
    reject_family,
)
from paceline.planner.cost_model import CostModel
from paceline.planner.layout_space import SEARCHED_STRATEGIES
from paceline.planner.target import PricedCluster

TRIED_BATCH_SIZES = 3
"""Batches of one pass that are timed, from the largest that fits down."""
EQUAL_SPEED = 0.1
"""Relative difference below which two layouts are equally fast: estimates are not better than that."""
MAX_FSDP_DEVICES = 8
"""Devices beyond which the tree goes from sharding to pipeline and tensor."""
TERM_WORDS = {
    "compute_s": "computes",
    "exposed_s": "waits for its links",
    "bubble_s": "has an idle pipeline",
    "update_s": "updates",
    "overhead_s": "launches",
    "offload_s": "moves states to the host",
    "data_s": "waits for data",
}
"""What a layout does in each term of its step."""


class RuleOfThumb(Enum):
    """What the well-known decision tree says."""

    ONE = "fits on one device"
    DDP = "fits on one device → ddp"
    FSDP = "does not fit on one device → fsdp"
    SPLIT = "does not fit on one device, and there are many → tensor, pipeline or both"

    def takes(self, layout: Layout) -> bool:
        """Whether a layout is of the kind that it says."""
        split = layout.tensor * layout.pipeline > 1
        return {RuleOfThumb.FSDP: not split and not layout.plain, RuleOfThumb.SPLIT: split}.get(self, layout.plain)


@dataclass(frozen=True)
class LayoutVerdict:
    """The choice beside the tree's: whether they agree and, if not, what speaks against the tree's."""

    leaf: RuleOfThumb
    chosen: PricedLayout
    other: PricedLayout | None = None
    """What the tree would take instead, where it fits: its best or, where both are of one kind, plain fsdp."""
    refused: RejectedFamily | None = None
    """Why the model cannot be divided as the tree says."""
    insisted: bool = False
    """The run file leaves the tree no choice."""

    @property
    def agrees(self) -> bool:
        return self.leaf.takes(self.chosen.layout)

    def words(self) -> str:
        name, other, says = family_name(self.chosen.layout), self.other, self.leaf.value
        if self.agrees:
            faster = f" Of that kind, {name} is {other.step_s / self.chosen.step_s:.2f}× as fast." if other else ""
            return f"The usual tree agrees: {says}.{faster}"
        if self.insisted:
            return f"The usual tree says: {says}. The run file insists on {name}."
        if other is None:
            why = f": {self.refused.family}: {self.refused.reason}" if self.refused else ", which does not fit here"
            return f"The usual tree says: {says}{why}. {name} it is."
        if other.tight and not self.chosen.tight:
            room = f"{size(other.memory.total_bytes)} of {size(other.capacity_bytes)}"
            return f"The usual tree says: {says}. Here that leaves no room for error ({room}), and {name} does."
        gaps = {term: getattr(other.time, term) - getattr(self.chosen.time, term) for term in TERM_WORDS}
        most = max(gaps, key=lambda term: gaps[term])
        return (
            f"The usual tree says: {says}. Here {name} is {other.step_s / self.chosen.step_s:.2f}× as fast as "
            f"{family_name(other.layout)}: the latter {TERM_WORDS[most]} {duration(gaps[most])} longer per step."
        )


@dataclass(frozen=True)
class SearchResult:
    """What there is on one number of devices; the best of each family, fastest first."""

    devices: int
    prices: tuple[PricedLayout, ...]
    refused: tuple[RejectedFamily, ...]
    chosen: PricedLayout | None
    usual: LayoutVerdict | None
    """What the usual tree says of the choice."""


def search_layouts(subject: CostModel, devices: int, where: PricedCluster, limits: LayoutConstraints) -> SearchResult:
    tried: list[PricedLayout | RejectedFamily] = []
    families: list[LayoutFamily] = []
    for family in subject.families(devices, where.cluster, limits):
        if isinstance(family, RejectedFamily):
            tried.append(family)
            continue
        families.append(family)
        if not family.offloaded_only:
            tried += _search_family(subject, family, where, limits, bool(limits.offload))
    if limits.offload is None and not any(isinstance(one, PricedLayout) for one in tried):
        tried += [one for family in families for one in _search_family(subject, family, where, limits, True)]
    best = sorted((one for one in tried if isinstance(one, PricedLayout)), key=lambda p: p.step_s)
    fit = {family_name(p.layout) for p in best}
    out = tuple(one for one in tried if isinstance(one, RejectedFamily) and one.family not in fit)
    whole = any(p.layout.plain and not p.tight for p in best) or _fits_whole(subject, devices, where, limits)
    usual = _choose(best, out, devices, whole)
    return SearchResult(devices, tuple(best), out, usual.chosen if usual else None, usual)


def _search_family(
    subject: CostModel, family: LayoutFamily, where: PricedCluster, limits: LayoutConstraints, offload: bool
) -> list[PricedLayout | RejectedFamily]:
    """The fastest member of a family that fits, or why none does; nothing where it has no members."""
    found: PricedLayout | None = None
    hungry: PricedLayout | None = None  # fits into the device, and not into its host
    least: tuple[float, Layout] | None = None
    device = where.cluster.device

    def held_bytes(layout: Layout) -> float:
        return subject.memory(layout, where).held_bytes(device)

    for layouts in subject.members(family, limits, offload):
        for layout in _select_fitting(layouts, lambda layout: held_bytes(layout) <= device.memory_bytes)[
            :TRIED_BATCH_SIZES
        ]:
            for variant in subject.schedules(layout, limits):
                priced = subject.price(variant, where)
                if priced.host_over_bytes > 0:
                    hungry = min(filter(None, (hungry, priced)), key=lambda p: p.host_over_bytes)
                elif priced.fits and (found is None or _is_better(priced, found)):
                    found = priced
        if found is not None and not found.tight and layouts and held_bytes(layouts[0]) <= device.memory_bytes:
            break  # every batch fits: to compute anything again can only take longer
        if found is None and layouts:
            least = min(filter(None, (least, (held_bytes(layouts[-1]), layouts[-1]))), key=lambda one: one[0])
    if found is not None:
        return [found]
    if hungry is not None:
        facts = {"needed_bytes": hungry.host_node_bytes, "capacity_bytes": hungry.where.cluster.host_bytes}
        return [reject_family(family, RejectReason.HOST_MEMORY, hungry, hungry.host_over_bytes, **facts)]
    if least is None:
        return []
    smallest, kind = subject.price(least[1], where), RejectReason.MEMORY_OFFLOADED if offload else RejectReason.MEMORY
    return [reject_family(family, kind, smallest, smallest.over_bytes, term=smallest.memory.largest_term())]


def _select_fitting(layouts: list[Layout], fits: Callable[[Layout], bool]) -> list[Layout]:
    """Of layouts from the hungriest on. The first is tried by itself: it need not keep gradients between passes."""
    first = bisect_left(layouts, True, lo=1, key=fits) if len(layouts) > 1 else len(layouts)
    return [*filter(fits, layouts[:1]), *layouts[first:]]


def _fits_whole(subject: CostModel, devices: int, where: PricedCluster, limits: LayoutConstraints) -> bool:
    """Whether the whole model fits on a device where the run file does not allow what a search would find out."""
    if limits == LayoutConstraints():
        return False
    free = (
        f
        for f in subject.families(devices, where.cluster, LayoutConstraints())
        if isinstance(f, LayoutFamily) and f.base.plain
    )
    found = (one for family in free for one in _search_family(subject, family, where, LayoutConstraints(), False))
    return any(isinstance(one, PricedLayout) and not one.tight for one in found)


def _is_better(new: PricedLayout, old: PricedLayout) -> bool:
    """Roomy before tight, then faster; where equally fast, with less recomputed."""
    return (new.tight, new.step_s) < (old.tight, old.step_s * (1 - 1e-9))


def _simplicity(p: PricedLayout) -> tuple[int, int, int]:
    layout = p.layout
    return (layout.tensor * layout.pipeline, SEARCHED_STRATEGIES.index(layout.strategy), layout.offload)


def _choose(
    best: Sequence[PricedLayout], out: Sequence[RejectedFamily], devices: int, whole: bool
) -> LayoutVerdict | None:
    """The fastest; what is within 10 % counts as equal, and then the tree's own and the simplest come first.

    `whole`: the model fits on one device.
    """
    if not best:
        return None
    pool = [p for p in best if not p.tight] or best
    fastest = min(pool, key=lambda p: p.step_s)
    near = [p for p in pool if p.step_s <= fastest.step_s * (1 + EQUAL_SPEED)]
    if whole or any(p.layout.plain for p in pool):
        leaf = RuleOfThumb.DDP if devices > 1 else RuleOfThumb.ONE
    else:
        leaf = RuleOfThumb.FSDP if devices <= MAX_FSDP_DEVICES else RuleOfThumb.SPLIT
    chosen = min([p for p in near if leaf.takes(p.layout)] or near, key=_simplicity)
    theirs = [p for p in best if leaf.takes(p.layout)]
    if leaf.takes(chosen.layout):
        plain = [p for p in theirs if family_name(p.layout) == "fsdp" and not p.tight]
        beaten = leaf is RuleOfThumb.FSDP and chosen.layout.strategy != "fsdp" and plain
        return LayoutVerdict(leaf, chosen, plain[0] if beaten else None)
    if theirs:
        return LayoutVerdict(leaf, chosen, min(theirs, key=lambda p: (p.tight, p.step_s)))
    divided = next((r for r in out if r.axes), None)
    return LayoutVerdict(leaf, chosen, refused=divided if leaf is RuleOfThumb.SPLIT else None, insisted=whole)
