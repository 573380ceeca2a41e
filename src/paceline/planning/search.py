"""The search: on each number of devices, the fastest layout that fits, the runners-up, and why the rest is out.

Of two layouts that are equally fast, the simpler is taken. The well-known decision tree (fits on one device: ddp; does
not: fsdp; many nodes: pipeline and tensor) is asked too, and the answer says whether it agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.layout import Layout
from paceline.planning.candidates import STRATEGIES, Family, Limits, Refused, families, family_name, members
from paceline.planning.price import EXACT, Price, Ways, device_bytes, memory_of, price
from paceline.planning.site import Where
from paceline.planning.subject import Subject
from paceline.record.units import duration, size

TRIED_SIZES = 3
"""Batches of one pass that are timed, from the largest that fits down."""
AS_FAST = 0.1
"""Relative difference below which two layouts are equally fast: estimates are not better than that."""
NODE = 8
"""Devices beyond which the usual tree goes from sharding to pipeline and tensor."""


@dataclass(frozen=True)
class Found:
    """What there is on one number of devices; the best of each family, fastest first."""

    devices: int
    prices: tuple[Price, ...]
    refused: tuple[Refused, ...]
    chosen: Price | None
    usual: str
    """What the usual tree says, and whether this search agrees."""


def search(subject: Subject, devices: int, where: Where, limits: Limits, ways: Ways = EXACT) -> Found:
    best: list[Price] = []
    refused: list[Refused] = []
    possible: list[Family] = []
    for family in families(subject, devices, where.cluster, limits):
        if isinstance(family, Refused):
            refused.append(family)
        elif devices == 1 and family.base.strategy == "fsdp" and limits.offload is None and limits.strategy is None:
            possible.append(family)  # to be tried with offload alone
        else:
            possible.append(family)
            _enter(subject, family, where, limits, bool(limits.offload), ways, best, refused)
    if not best and limits.offload is None:
        for family in possible:
            _enter(subject, family, where, limits, True, ways, best, refused)
    best.sort(key=lambda p: p.step_s)
    fit = {family_name(p.layout) for p in best}
    refused = [r for r in refused if r.family not in fit]
    chosen, usual = _choose(best, refused, devices)
    return Found(devices, tuple(best), tuple(refused), chosen, usual)


def _enter(
    subject: Subject,
    family: Family,
    where: Where,
    limits: Limits,
    offload: bool,
    ways: Ways,
    best: list[Price],
    refused: list[Refused],
) -> None:
    """Put the fastest member that fits among the best, or the reason why none fits among the refused."""
    found: Price | None = None
    hungry: Price | None = None  # fits into the device, and not into its host
    least: tuple[float, Layout] | None = None
    device = where.cluster.device
    for layouts in members(subject, family, limits, offload):
        tried = 0
        for layout in layouts:
            total = device_bytes(memory_of(subject, layout, where), device)
            if least is None or total < least[0]:
                least = (total, layout)
            if total > device.memory_bytes:
                continue
            for variant in _schedules(layout, subject, limits):
                priced = price(subject, variant, where, ways)
                if priced.host_over_bytes > 0:
                    hungry = min(filter(None, (hungry, priced)), key=lambda p: p.host_over_bytes)
                elif priced.fits and (found is None or _better(priced, found)):
                    found = priced
            tried += 1
            if tried == TRIED_SIZES:
                break
    if found is not None:
        best.append(found)
    elif hungry is not None:
        refused.append(Refused(hungry.layout.ranks, family.name, _host_missing(hungry), hungry.host_over_bytes))
    elif least is not None:
        smallest = price(subject, least[1], where, ways)
        missing = smallest.over_bytes / 1e9
        amount = f"{missing:.0f} GB" if missing >= 9.5 else f"{missing:.1f} GB"
        how = " even offloaded" if offload else ""
        refused.append(
            Refused(least[1].ranks, family.name, f"{smallest.largest_term()} {amount} over{how}", missing * 1e9)
        )


def _host_missing(p: Price) -> str:
    capacity = p.where.cluster.host_bytes or 0.0
    return f"offloaded states take {size(p.host_node_bytes)} of host memory per node, which has {size(capacity)}"


def _schedules(layout: Layout, subject: Subject, limits: Limits) -> Iterator[Layout]:
    """Where a pipeline may choose: one stage per rank, or two in turn, which makes the bubble smaller."""
    yield layout
    if layout.pipeline > 1 and limits.schedule is None and subject.layers % (2 * layout.pipeline) == 0:
        yield replace(layout, schedule="interleaved")


def _better(new: Price, old: Price) -> bool:
    """Roomy before tight, then faster; where equally fast, with less recomputed."""
    if new.tight != old.tight:
        return old.tight
    return new.step_s < old.step_s * (1 - 1e-9)


def _simplicity(p: Price) -> tuple[int, int, int]:
    layout = p.layout
    return (layout.tensor * layout.pipeline, STRATEGIES.index(layout.strategy), layout.offload)


def _choose(best: list[Price], refused: list[Refused], devices: int) -> tuple[Price | None, str]:
    """The fastest; what is within 10 % counts as equal, and then the tree's own and the simplest come first."""
    if not best:
        return None, ""
    pool = [p for p in best if not p.tight] or best
    fastest = min(pool, key=lambda p: p.step_s)
    near = [p for p in pool if p.step_s <= fastest.step_s * (1 + AS_FAST)]
    whole = [p for p in pool if p.layout.plain]
    says, matches = _tree(bool(whole), devices)
    ours = [p for p in near if _kind(p.layout) == matches] or near
    chosen = min(ours, key=_simplicity)
    return chosen, _agreement(chosen, says, matches, best, refused)


def _kind(layout: Layout) -> str:
    if layout.tensor * layout.pipeline > 1:
        return "split"
    return "whole" if layout.plain else "sharded"


def _tree(fits_whole: bool, devices: int) -> tuple[str, str]:
    if fits_whole:
        return ("fits on one device → ddp", "whole") if devices > 1 else ("fits on one device", "whole")
    if devices <= NODE:
        return "does not fit on one device → fsdp", "sharded"
    return "does not fit, many devices → pipeline + tensor", "split"


def _agreement(chosen: Price, says: str, matches: str, best: list[Price], refused: list[Refused]) -> str:
    name = family_name(chosen.layout)
    theirs = [p for p in best if _kind(p.layout) == matches]
    if _kind(chosen.layout) == matches:
        others = [p for p in theirs if family_name(p.layout) == "fsdp" and not p.tight]
        if matches == "sharded" and chosen.layout.strategy != "fsdp" and others:
            gain = others[0].step_s / chosen.step_s
            return f"The usual tree agrees: {says}. Of that kind, {name} is {gain:.2f}× as fast."
        return f"The usual tree agrees: {says}."
    if theirs:
        other = min(theirs, key=lambda p: (p.tight, p.step_s))
        if other.tight and not chosen.tight:
            room = f"{size(other.memory.total_bytes)} of {size(other.capacity_bytes)}"
            return f"The usual tree says: {says}. Here that leaves no room for error ({room}), and {name} does."
        return (
            f"The usual tree says: {says}. Here {name} is {other.step_s / chosen.step_s:.2f}× as fast as "
            f"{family_name(other.layout)}: {_why(chosen, other)}."
        )
    out = next((r for r in refused if "tensor" in r.family or "pipeline" in r.family), None)
    because = f": {out.family}: {out.reason}" if out and matches == "split" else ", which does not fit here"
    return f"The usual tree says: {says}{because}. {name} it is."


def _why(chosen: Price, other: Price) -> str:
    """The term of the step in which the other layout loses most."""
    names = {
        "compute_s": "computes",
        "exposed_s": "waits for its links",
        "bubble_s": "has an idle pipeline",
        "update_s": "updates",
        "overhead_s": "launches",
        "offload_s": "moves states to the host",
        "data_s": "waits for data",
    }
    gaps = {term: getattr(other.time, term) - getattr(chosen.time, term) for term in names}
    term = max(gaps, key=lambda t: gaps[t])
    return f"the latter {names[term]} {duration(gaps[term])} longer per step"
