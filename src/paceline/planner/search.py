"""Search the fastest layout that fits on each number of devices, with the runners-up and the rejected families."""

import functools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from paceline.io.format import duration, percent, size
from paceline.layout import Layout
from paceline.planner.candidates import SEARCHED_STRATEGIES, PricedLayout, RejectedFamily, RejectReason
from paceline.planner.cost_model import TIME_TERMS, CostModel
from paceline.planner.target import PricedCluster

TRIED_BATCH_SIZES = 3  # micro-batches that are timed, from the largest that fits down
EQUAL_SPEED = 0.1
"""Relative difference below which two layouts are equally fast: estimates are not better than that."""


@dataclass(frozen=True)
class SearchResult:
    """What was found on one number of devices."""

    devices: int
    prices: tuple[PricedLayout, ...]  # the best of each family that fits, fastest first
    rejected: tuple[RejectedFamily, ...]

    @functools.cached_property
    def chosen(self) -> PricedLayout | None:
        """The simplest of the layouts within 10 % of the fastest; a tight one only if there is no other."""
        pool = [p for p in self.prices if not p.tight] or self.prices
        return min((p for p in pool if p.step_s <= pool[0].step_s * (1 + EQUAL_SPEED)), key=_simplicity, default=None)

    def explain_choice(self) -> str:
        """Return what the chosen layout is faster, roomier or simpler than; "" if nothing else is near."""
        if (chosen := self.chosen) is None:
            return ""
        name, others = chosen.layout.family, [p for p in self.prices if p is not chosen]
        if simpler := [p for p in others if _simplicity(p) < _simplicity(chosen)]:
            other = simpler[0]
            if other.tight and not chosen.tight:
                room = f"{size(other.memory.total_bytes)} of {size(other.capacity_bytes)}"
                return f"{other.layout.family} is simpler but leaves no room for error ({room})."
            gaps = {term: getattr(other.time, term) - getattr(chosen.time, term) for term in TIME_TERMS}
            most = max(gaps, key=lambda term: gaps[term])
            why = f"takes {duration(gaps[most])} longer per step ({TIME_TERMS[most]})"
            times = f"{other.step_s / chosen.step_s:.2f}× as fast as {other.layout.family}"
            return f"{name} is {times}, which {why}."
        if others and others[0].step_s < chosen.step_s:
            gain = percent(1 - others[0].step_s / chosen.step_s)
            return f"{others[0].layout.family} would save {gain} of a step, within the error; {name} is simpler."
        return ""


def search_layouts(cost_model: CostModel, devices: int, where: PricedCluster) -> SearchResult:
    search, offload = _Search(cost_model, where), cost_model.constraints.offload
    tried: list[PricedLayout | RejectedFamily] = []
    families: list[Layout] = []
    for family in cost_model.families(devices, where.cluster):
        if isinstance(family, RejectedFamily):
            tried.append(family)
            continue
        families.append(family)
        if not family.offload:
            tried += search.best_of(family, bool(offload))
    if offload is None and not any(isinstance(one, PricedLayout) for one in tried):
        tried += [one for family in families for one in search.best_of(family, True)]
    best = sorted((one for one in tried if isinstance(one, PricedLayout)), key=lambda p: p.step_s)
    fit = {p.layout.family for p in best}
    rejected = tuple(one for one in tried if isinstance(one, RejectedFamily) and one.family not in fit)
    return SearchResult(devices, tuple(best), rejected)


@dataclass(frozen=True)
class _Search:
    cost_model: CostModel
    where: PricedCluster

    def best_of(self, family: Layout, offload: bool) -> list[PricedLayout | RejectedFamily]:
        """Return the fastest member of a family that fits, or why none does; nothing if it has no members."""
        found: PricedLayout | None = None
        hungry: list[PricedLayout] = []  # fit on the device, but not into the host memory
        smallest: list[Layout] = []
        for layouts in self.cost_model.members(family, offload):
            for layout in _select_fitting(layouts, self._fits_device)[:TRIED_BATCH_SIZES]:
                for variant in self.cost_model.schedules(layout):
                    priced = self.cost_model.price(variant, self.where)
                    if priced.host_over_bytes > 0:
                        hungry.append(priced)
                    elif priced.fits and (found is None or _is_better(priced, found)):
                        found = priced
            if found is not None and not found.tight and layouts and self._fits_device(layouts[0]):
                break  # every batch fits: recomputation can only take longer
            smallest += layouts[-1:]
        if found is not None:
            return [found]
        if hungry:
            nearest = min(hungry, key=lambda p: p.host_over_bytes)
            facts = {"needed_bytes": nearest.host_node_bytes, "capacity_bytes": self.where.cluster.host_bytes}
            return [RejectedFamily.of(nearest, RejectReason.HOST_MEMORY, nearest.host_over_bytes, **facts)]
        if not smallest:
            return []
        nearest = self.cost_model.price(min(smallest, key=self._held_bytes), self.where)
        code = RejectReason.MEMORY_OFFLOADED if offload else RejectReason.MEMORY
        return [RejectedFamily.of(nearest, code, nearest.over_bytes, term=nearest.memory.largest_term())]

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
    """Prefer roomy to tight, then faster; of equally fast ones, the first, which recomputes less."""
    return (new.tight, new.step_s) < (old.tight, old.step_s * (1 - 1e-9))


def _simplicity(p: PricedLayout) -> tuple[int, ...]:
    """Order layouts by how much there is to understand: axes that divide the model, their size, the strategy."""
    layout = p.layout
    axes = len(layout.split_axes), layout.tensor * layout.context * layout.pipeline
    return (*axes, SEARCHED_STRATEGIES.index(layout.strategy), layout.offload)
