"""Search the fastest layout that fits on each number of devices, with the runners-up and the rejected families."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.io.format import duration, size
from paceline.layout import Layout
from paceline.planner.candidates import (
    SEARCHED_STRATEGIES,
    LayoutConstraints,
    PricedLayout,
    RejectedFamily,
    RejectReason,
    family_name,
)
from paceline.planner.cost_model import TIME_TERMS, CostModel
from paceline.planner.target import PricedCluster

TRIED_BATCH_SIZES = 3  # micro-batches that are timed, from the largest that fits down
EQUAL_SPEED = 0.1
"""Relative difference below which two layouts are equally fast: estimates are not better than that."""
MAX_FSDP_DEVICES = 8  # devices beyond which the rule of thumb goes from sharding to pipeline and tensor


class RuleOfThumb(Enum):
    """What the well-known decision tree recommends."""

    ONE = "fits on one device"
    DDP = "fits on one device → ddp"
    FSDP = "does not fit on one device → fsdp"
    SPLIT = "does not fit on one device, and there are many → tensor, pipeline or both"

    def matches(self, layout: Layout) -> bool:
        split = layout.tensor * layout.pipeline > 1
        kinds = {RuleOfThumb.FSDP: not split and not layout.plain, RuleOfThumb.SPLIT: split}
        return kinds.get(self, layout.plain)


@dataclass(frozen=True)
class LayoutVerdict:
    """The chosen layout beside the one of the rule of thumb."""

    rule: RuleOfThumb
    chosen: PricedLayout
    other: PricedLayout | None = None
    """What the rule would take instead, if it fits: its best or, where both are of one kind, plain fsdp."""
    rejected: RejectedFamily | None = None  # why the model cannot be divided as the rule says
    fixed: bool = False  # the run file leaves the rule no choice

    @property
    def agrees(self) -> bool:
        return self.rule.matches(self.chosen.layout)

    def describe(self) -> str:
        name, other, rule = family_name(self.chosen.layout), self.other, self.rule.value
        if self.agrees:
            faster = f" Of that kind, {name} is {other.step_s / self.chosen.step_s:.2f}× as fast." if other else ""
            return f"The rule of thumb agrees: {rule}.{faster}"
        if self.fixed:
            return f"The rule of thumb is: {rule}. The run file fixes {name}."
        if other is None:
            why = f": {self.rejected.family}: {self.rejected.reason}" if self.rejected else ", which does not fit here"
            return f"The rule of thumb is: {rule}{why}. So the choice is {name}."
        if other.tight and not self.chosen.tight:
            room = f"{size(other.memory.total_bytes)} of {size(other.capacity_bytes)}"
            return f"The rule of thumb is: {rule}. Here that leaves no room for error ({room}), and {name} does."
        gaps = {term: getattr(other.time, term) - getattr(self.chosen.time, term) for term in TIME_TERMS}
        most = max(gaps, key=lambda term: gaps[term])
        return (
            f"The rule of thumb is: {rule}. Here {name} is {other.step_s / self.chosen.step_s:.2f}× as fast as "
            f"{family_name(other.layout)}, which takes {duration(gaps[most])} longer per step ({TIME_TERMS[most]})."
        )


@dataclass(frozen=True)
class SearchResult:
    """What was found on one number of devices."""

    devices: int
    prices: tuple[PricedLayout, ...]  # the best of each family that fits, fastest first
    rejected: tuple[RejectedFamily, ...]
    verdict: LayoutVerdict | None

    @property
    def chosen(self) -> PricedLayout | None:
        return self.verdict.chosen if self.verdict else None


def search_layouts(
    cost_model: CostModel, devices: int, where: PricedCluster, constraints: LayoutConstraints
) -> SearchResult:
    search = _Search(cost_model, where, constraints)
    tried: list[PricedLayout | RejectedFamily] = []
    families: list[Layout] = []
    for family in cost_model.families(devices, where.cluster, constraints):
        if isinstance(family, RejectedFamily):
            tried.append(family)
            continue
        families.append(family)
        if not family.offload:
            tried += search.best_of(family, bool(constraints.offload))
    if constraints.offload is None and not any(isinstance(one, PricedLayout) for one in tried):
        tried += [one for family in families for one in search.best_of(family, True)]
    best = sorted((one for one in tried if isinstance(one, PricedLayout)), key=lambda p: p.step_s)
    fit = {family_name(p.layout) for p in best}
    rejected = tuple(one for one in tried if isinstance(one, RejectedFamily) and one.family not in fit)
    whole = any(p.layout.plain and not p.tight for p in best) or search.fits_unsplit(devices)
    return SearchResult(devices, tuple(best), rejected, _choose(best, rejected, devices, whole))


@dataclass(frozen=True)
class _Search:
    cost_model: CostModel
    where: PricedCluster
    constraints: LayoutConstraints

    def best_of(self, family: Layout, offload: bool) -> list[PricedLayout | RejectedFamily]:
        """Return the fastest member of a family that fits, or why none does; nothing if it has no members."""
        found: PricedLayout | None = None
        hungry: PricedLayout | None = None  # fits on the device, but not into the host memory
        least: tuple[float, Layout] | None = None
        for layouts in self.cost_model.members(family, self.constraints, offload):
            for layout in _select_fitting(layouts, self._fits_device)[:TRIED_BATCH_SIZES]:
                for variant in self.cost_model.schedules(layout, self.constraints):
                    priced = self.cost_model.price(variant, self.where)
                    if priced.host_over_bytes > 0:
                        hungry = min(filter(None, (hungry, priced)), key=lambda p: p.host_over_bytes)
                    elif priced.fits and (found is None or _is_better(priced, found)):
                        found = priced
            if found is not None and not found.tight and layouts and self._fits_device(layouts[0]):
                break  # every batch fits: recomputation can only take longer
            if found is None and layouts:
                smallest = (self._held_bytes(layouts[-1]), layouts[-1])
                least = min(filter(None, (least, smallest)), key=lambda one: one[0])
        if found is not None:
            return [found]
        if hungry is not None:
            facts = {"needed_bytes": hungry.host_node_bytes, "capacity_bytes": hungry.where.cluster.host_bytes}
            return [RejectedFamily.of(hungry, RejectReason.HOST_MEMORY, hungry.host_over_bytes, **facts)]
        if least is None:
            return []
        nearest = self.cost_model.price(least[1], self.where)
        code = RejectReason.MEMORY_OFFLOADED if offload else RejectReason.MEMORY
        return [RejectedFamily.of(nearest, code, nearest.over_bytes, term=nearest.memory.largest_term())]

    def fits_unsplit(self, devices: int) -> bool:
        """Whether the whole model fits on a device if the run file fixes nothing; False if it does not anyway."""
        if self.constraints == LayoutConstraints():
            return False
        free = _Search(self.cost_model, self.where, LayoutConstraints())
        families = self.cost_model.families(devices, self.where.cluster, free.constraints)
        plain = (family for family in families if isinstance(family, Layout) and family.plain)
        found = (one for family in plain for one in free.best_of(family, False))
        return any(isinstance(one, PricedLayout) and not one.tight for one in found)

    def _held_bytes(self, layout: Layout) -> float:
        return self.cost_model.memory(layout, self.where).held_bytes(self.where.cluster.device)

    def _fits_device(self, layout: Layout) -> bool:
        return self._held_bytes(layout) <= self.where.cluster.device.memory_bytes


def _select_fitting(layouts: list[Layout], fits: Callable[[Layout], bool]) -> list[Layout]:
    """Select those that fit from layouts that need less and less memory.

    The first is tried on its own: it alone need not keep gradients between micro-batches.
    """
    first = bisect_left(layouts, True, lo=1, key=fits) if len(layouts) > 1 else len(layouts)
    return [*filter(fits, layouts[:1]), *layouts[first:]]


def _is_better(new: PricedLayout, old: PricedLayout) -> bool:
    """Roomy before tight, then faster; of equally fast ones, the first, which recomputes less."""
    return (new.tight, new.step_s) < (old.tight, old.step_s * (1 - 1e-9))


def _simplicity(p: PricedLayout) -> tuple[int, int, int]:
    layout = p.layout
    return (layout.tensor * layout.pipeline, SEARCHED_STRATEGIES.index(layout.strategy), layout.offload)


def _choose(
    best: Sequence[PricedLayout], rejected: Sequence[RejectedFamily], devices: int, whole: bool
) -> LayoutVerdict | None:
    """Choose the fastest; of those within 10 %, the ones that match the rule of thumb, then the simplest.

    `whole`: the model fits on one device.
    """
    if not best:
        return None
    pool = [p for p in best if not p.tight] or best
    fastest = min(pool, key=lambda p: p.step_s)
    near = [p for p in pool if p.step_s <= fastest.step_s * (1 + EQUAL_SPEED)]
    if whole or any(p.layout.plain for p in pool):
        rule = RuleOfThumb.DDP if devices > 1 else RuleOfThumb.ONE
    else:
        rule = RuleOfThumb.FSDP if devices <= MAX_FSDP_DEVICES else RuleOfThumb.SPLIT
    chosen = min([p for p in near if rule.matches(p.layout)] or near, key=_simplicity)
    matching = [p for p in best if rule.matches(p.layout)]
    if rule.matches(chosen.layout):
        plain = [p for p in matching if family_name(p.layout) == "fsdp" and not p.tight]
        beaten = rule is RuleOfThumb.FSDP and chosen.layout.strategy != "fsdp" and plain
        return LayoutVerdict(rule, chosen, plain[0] if beaten else None)
    if matching:
        return LayoutVerdict(rule, chosen, min(matching, key=lambda p: (p.tight, p.step_s)))
    split = next((r for r in rejected if r.axes), None)
    return LayoutVerdict(rule, chosen, rejected=split if rule is RuleOfThumb.SPLIT else None, fixed=whole)
