"""The search: on each number of devices, the fastest layout that fits, the runners-up, and why the rest is out.

Of two layouts that are equally fast, the simpler is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.layout import Layout
from paceline.planning.candidates import Family, Limits, Refusal, Refused, family_name, refused
from paceline.planning.layouts import STRATEGIES
from paceline.planning.price import Price
from paceline.planning.site import Where
from paceline.planning.subject import Subject
from paceline.planning.usual_tree import Verdict, kind_of, leaf_of, verdict

TRIED_SIZES = 3
"""Batches of one pass that are timed, from the largest that fits down."""
AS_FAST = 0.1
"""Relative difference below which two layouts are equally fast: estimates are not better than that."""


@dataclass(frozen=True)
class Found:
    """What there is on one number of devices; the best of each family, fastest first."""

    devices: int
    prices: tuple[Price, ...]
    refused: tuple[Refused, ...]
    chosen: Price | None
    usual: Verdict | None
    """What the usual tree says of the choice."""


def search(subject: Subject, devices: int, where: Where, limits: Limits) -> Found:
    tried: list[Price | Refused] = []
    families: list[Family] = []
    for family in subject.families(devices, where.cluster, limits):
        if isinstance(family, Refused):
            tried.append(family)
            continue
        families.append(family)
        if not family.offloaded_only:
            tried += _best(subject, family, where, limits, bool(limits.offload))
    if limits.offload is None and not any(isinstance(one, Price) for one in tried):
        tried += [one for family in families for one in _best(subject, family, where, limits, True)]
    best = sorted((one for one in tried if isinstance(one, Price)), key=lambda p: p.step_s)
    fit = {family_name(p.layout) for p in best}
    out = tuple(one for one in tried if isinstance(one, Refused) and one.family not in fit)
    usual = _choose(best, out, devices)
    return Found(devices, tuple(best), out, usual.chosen if usual else None, usual)


def _best(subject: Subject, family: Family, where: Where, limits: Limits, offload: bool) -> list[Price | Refused]:
    """The fastest member of a family that fits, or why none does; nothing where it has no members."""
    found: Price | None = None
    hungry: Price | None = None  # fits into the device, and not into its host
    least: tuple[float, Layout] | None = None
    device = where.cluster.device
    for layouts in subject.members(family, limits, offload):
        tried = 0
        for layout in layouts:
            total = subject.memory(layout, where).held_bytes(device)
            if least is None or total < least[0]:
                least = (total, layout)
            if total > device.memory_bytes:
                continue
            for variant in subject.schedules(layout, limits):
                priced = subject.price(variant, where)
                if priced.host_over_bytes > 0:
                    hungry = min(filter(None, (hungry, priced)), key=lambda p: p.host_over_bytes)
                elif priced.fits and (found is None or _better(priced, found)):
                    found = priced
            tried += 1
            if tried == TRIED_SIZES:
                break
    if found is not None:
        return [found]
    if hungry is not None:
        facts = {"needed_bytes": hungry.host_node_bytes, "capacity_bytes": hungry.where.cluster.host_bytes}
        return [refused(family, Refusal.HOST_MEMORY, hungry.host_over_bytes, **facts)]
    if least is None:
        return []
    smallest, kind = subject.price(least[1], where), Refusal.MEMORY_OFFLOADED if offload else Refusal.MEMORY
    return [refused(family, kind, smallest.over_bytes, term=smallest.memory.largest_term())]


def _better(new: Price, old: Price) -> bool:
    """Roomy before tight, then faster; where equally fast, with less recomputed."""
    if new.tight != old.tight:
        return old.tight
    return new.step_s < old.step_s * (1 - 1e-9)


def _simplicity(p: Price) -> tuple[int, int, int]:
    layout = p.layout
    return (layout.tensor * layout.pipeline, STRATEGIES.index(layout.strategy), layout.offload)


def _choose(best: Sequence[Price], out: Sequence[Refused], devices: int) -> Verdict | None:
    """The fastest; what is within 10 % counts as equal, and then the tree's own and the simplest come first."""
    if not best:
        return None
    pool = [p for p in best if not p.tight] or best
    fastest = min(pool, key=lambda p: p.step_s)
    near = [p for p in pool if p.step_s <= fastest.step_s * (1 + AS_FAST)]
    leaf = leaf_of(any(p.layout.plain for p in pool), devices)
    ours = [p for p in near if kind_of(p.layout) is leaf.kind] or near
    return verdict(leaf, min(ours, key=_simplicity), best, out)
