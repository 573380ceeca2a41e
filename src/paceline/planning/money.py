"""What a number of devices buys: speed-up, efficiency, hours, cost, energy, and where it stops to pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.layout import Layout
from paceline.planning.price import Price
from paceline.planning.search import Found
from paceline.planning.subject import Subject

WORTH = 0.5
"""Efficiency below which more devices are not chosen: half of what is paid for would be lost."""
AS_FAST = 1.05
"""Times slower that still counts as equally fast."""
GAIN = 1.2
"""Times faster that twice the devices must be to be called worth it."""


@dataclass(frozen=True)
class PlannedRow:
    """One number of devices under its best layout."""

    devices: int
    found: Found
    price: Price
    speedup: float
    """Samples per second over those of one device."""
    hours: float | None
    cost_usd: float | None
    energy_kwh: float | None

    @property
    def efficiency(self) -> float:
        return self.speedup / self.devices

    @property
    def device_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.devices

    def as_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "hours": self.hours,
            "device_hours": self.device_hours,
            "cost_usd": self.cost_usd,
            "energy_kwh": self.energy_kwh,
            **self.price.as_json(),
            "usual_tree": self.found.usual.words() if self.found.usual else "",
            "candidates": [p.as_json() for p in self.found.prices],
            "refused": [r.as_json() for r in self.found.refused],
        }


def planned_row(found: Found, one_device: Price, subject: Subject, usd_per_device_hour: float | None) -> PlannedRow:
    assert found.chosen is not None
    chosen, n = found.chosen, found.devices
    hours = None if subject.steps is None else (chosen.start_s + subject.steps * chosen.step_s) / 3600
    watts = chosen.where.cluster.device.watts * n
    return PlannedRow(
        devices=n,
        found=found,
        price=chosen,
        speedup=one_device.step_s / chosen.step_s,
        hours=hours,
        cost_usd=None if hours is None or usd_per_device_hour is None else hours * n * usd_per_device_hour,
        energy_kwh=None if hours is None else hours * watts / 1e3,
    )


def pick(rows: Sequence[PlannedRow], shared: bool = False) -> PlannedRow:
    """The fastest at an efficiency of a half or more; where none has that, the most efficient.

    Ranks that share one machine cost nothing more: the fewest that are about as fast as the fastest.
    """
    if shared:
        best = max(r.speedup for r in rows)
        return next(r for r in rows if r.speedup * AS_FAST >= best)
    fine = [r for r in rows if r.efficiency >= WORTH]
    if not fine:
        return max(rows, key=lambda r: (r.efficiency, r.speedup))
    return max(fine, key=lambda r: (r.speedup, -r.devices))


def cheapest(rows: Sequence[PlannedRow]) -> PlannedRow:
    """The fewest device-hours, and so the least money."""
    return min(rows, key=lambda r: (r.devices * r.price.step_s, r.devices))


def fastest(rows: Sequence[PlannedRow]) -> PlannedRow:
    return min(rows, key=lambda r: (r.price.step_s, r.devices))


def break_even(rows: Sequence[PlannedRow]) -> int | None:
    """The fewest devices that beat one; None where none of those tried does."""
    return next((r.devices for r in rows if r.devices > 1 and r.speedup > 1), None)


def pays_until(rows: Sequence[PlannedRow]) -> int:
    """The most devices tried to which each doubling still added a fifth."""
    last = rows[0]
    for following in rows[1:]:
        doublings = following.devices / last.devices
        if following.speedup / last.speedup < GAIN ** math.log2(doublings):
            break
        last = following
    return last.devices


@dataclass(frozen=True)
class Ceilings:
    """What no number of devices can pass, for this batch."""

    serial_share: float
    """Of the step on one device that does not shrink with the batch: launches, update."""
    amdahl: float | None
    """1 / serial share; None where nothing is serial."""
    communication: float | None
    """The step on one device over the time that collectives are in flight on the most devices."""


def ceilings(subject: Subject, one_device: Price, most: Price) -> Ceilings:
    """The serial part is what a step costs as its batch goes to nothing: a line through batches of one and two."""
    one, two = (_batch_s(subject, one_device, batch) for batch in (1, 2))
    serial = max(0.0, min(1.0, (2 * one - two) / one_device.step_s)) if one_device.layout.global_batch > 2 else 1.0
    flight = most.time.comm_s
    return Ceilings(serial, 1 / serial if serial > 1e-9 else None, one_device.step_s / flight if flight else None)


def _batch_s(subject: Subject, one_device: Price, batch: int) -> float:
    layout: Layout = replace(one_device.layout, global_batch=batch, micro_batch=batch)
    return subject.price(layout, one_device.where).step_s
