"""One row of a plan for each number of devices, what the person who asks wants of it, and which row that is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import UserError
from paceline.io.arguments import check_price
from paceline.io.format import percent
from paceline.planner.candidates import PricedLayout
from paceline.planner.cost_model import CostModel
from paceline.planner.search import SearchResult

EQUALLY_FAST = 1.05
"""Times slower that still counts as equally fast: estimates are not better than that."""


@dataclass(frozen=True)
class PlanRow:
    """One number of devices under its best layout."""

    devices: int
    found: SearchResult
    price: PricedLayout
    speedup: float
    """Samples per second over those of the base."""
    base_devices: int
    """Of what speed-ups are counted from."""
    hours: float | None
    cost_usd: float | None
    energy_kwh: float | None
    spot_usd: float | None = None
    """The same hours at the price of devices that may be taken away."""
    pauses_s: Mapping[str, float] = field(default_factory=dict)
    """Of the whole run, between its steps; `hours` has them in it."""
    one_machine: bool = False
    """The devices are ranks that share one machine, which is paid for once."""

    @property
    def efficiency(self) -> float:
        """Speed-up over that of as many devices that lose nothing."""
        return self.speedup * self.base_devices / self.devices

    @property
    def device_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.paid_devices

    @property
    def paid_devices(self) -> int:
        return 1 if self.one_machine else self.devices

    @property
    def run_s(self) -> float:
        """Of the whole run or, where its length is not known, of a step: what rows are compared by."""
        return self.price.step_s if self.hours is None else 3600 * self.hours

    def as_json(self) -> dict[str, Any]:
        names = ("devices", "speedup", "efficiency", "hours", "device_hours", "cost_usd", "spot_usd", "energy_kwh")
        return {
            **{name: getattr(self, name) for name in names},
            **self.price.as_json(),
            "pauses_s": dict(self.pauses_s),
            "usual_tree": self.found.usual.words() if self.found.usual else "",
            "candidates": [p.as_json() for p in self.found.prices],
            "refused": [r.as_json() for r in self.found.refused],
        }


@dataclass(frozen=True)
class HourlyRates:
    """USD per device and hour; None where nobody said."""

    usd: float | None = None
    spot_usd: float | None = None
    """Of devices that may be taken away."""
    take_spot: bool = False
    """Count with that one."""

    def checked(self) -> HourlyRates:
        for option, value in (("--price", self.usd), ("--spot-price", self.spot_usd)):
            check_price(value, option)
        return self

    def over(self, usual: HourlyRates) -> HourlyRates:
        """What is said, else the usual ones; beside a price of one's own, other people's spot price means nothing."""
        said = self if self.usd is not None else replace(self, usd=usual.usd, spot_usd=self.spot_usd or usual.spot_usd)
        if not self.take_spot:
            return said
        if said.spot_usd is None:
            raise UserError("--spot: nobody said what such devices cost as spot; say it with  --spot-price USD")
        return replace(said, usd=said.spot_usd, spot_usd=None)


def build_plan_row(
    found: SearchResult, base: PricedLayout, subject: CostModel, rates: HourlyRates, one_machine: bool
) -> PlanRow:
    assert found.chosen is not None
    chosen, n = found.chosen, found.devices
    pauses_s = subject.pauses_s(chosen)
    hours = None
    if subject.steps is not None:
        hours = (chosen.start_s + subject.steps * chosen.step_s + sum(pauses_s.values())) / 3600
    kwh = None if hours is None else hours * (chosen.where.cluster.device.watts * n) / 1e3
    speedup = base.step_s / chosen.step_s
    row = PlanRow(n, found, chosen, speedup, base.devices, hours, None, kwh, None, pauses_s, one_machine)
    paid_h = row.device_hours
    usd, spot = (None if paid_h is None or rate is None else paid_h * rate for rate in (rates.usd, rates.spot_usd))
    return replace(row, cost_usd=usd, spot_usd=spot)


@dataclass(frozen=True)
class Requirements:
    """What a row must keep to; None leaves it open."""

    deadline_h: float | None = None
    budget_usd: float | None = None
    min_efficiency: float | None = None

    def __post_init__(self) -> None:
        for option, value, most in (
            ("--deadline", self.deadline_h, math.inf),
            ("--budget", self.budget_usd, math.inf),
            ("--min-efficiency", self.min_efficiency, 1.0),
        ):
            if value is not None and not 0 < value <= most:
                upto = f" and at most {most:g}" if most < math.inf else ""
                raise UserError(f"{option}: {value:g} is not possible; give more than 0{upto}")

    def check_answerable(self, hours: bool, priced: bool) -> None:
        """A wish about what is not known is refused: nothing could be said of it."""
        if self.deadline_h is not None and not hours:
            raise UserError(
                "--deadline: how long the run is, is not known; say it with  train.steps=N  or  --samples N"
            )
        if self.budget_usd is not None and not (hours and priced):
            missing = "--price USD" if hours else "train.steps=N  or  --samples N"
            raise UserError(f"--budget: what the run costs is not known; say  {missing}")

    def violation_of(self, row: PlanRow) -> str:
        """What a row does not keep to, in few words; empty where it keeps to everything."""
        if self.deadline_h is not None and row.hours is not None and row.hours > self.deadline_h:
            return "too late"
        if self.budget_usd is not None and row.cost_usd is not None and row.cost_usd > self.budget_usd:
            return "over budget"
        if self.min_efficiency is not None and row.efficiency < self.min_efficiency:
            return f"below {percent(self.min_efficiency)}"
        return ""


@dataclass(frozen=True)
class RowRanking:
    """The rows of a plan by what they are best at."""

    rows: tuple[PlanRow, ...]
    """Fewest devices first."""
    wishes: Requirements = field(default_factory=Requirements)

    @property
    def one_machine(self) -> bool:
        return any(row.one_machine for row in self.rows)

    def paid_s(self, row: PlanRow) -> float:
        """What money is proportional to."""
        return row.paid_devices * row.run_s

    @functools.cached_property
    def kept(self) -> tuple[PlanRow, ...]:
        """Rows that keep to all wishes."""
        return tuple(row for row in self.rows if not self.wishes.violation_of(row))

    @property
    def chosen(self) -> PlanRow | None:
        """With a deadline the cheapest that meets it, else the fastest; of rows as fast, the one with fewest devices.

        Where none keeps to the wishes, the one that comes nearest to the first of them.
        """
        wishes = self.wishes
        if not self.rows:
            return None
        if not self.kept and wishes.deadline_h is None:
            return self.cheapest if wishes.budget_usd is not None else self.most_efficient
        if self.kept and wishes.deadline_h is not None:
            return self._least(self.paid_s, self.kept)
        pool = self.kept or self.rows
        best = min(row.run_s for row in pool)
        return next(row for row in pool if row.run_s <= best * EQUALLY_FAST)

    @property
    def cheapest(self) -> PlanRow | None:
        """The fewest device-hours, and so the least money."""
        return self._least(self.paid_s)

    @property
    def fastest(self) -> PlanRow | None:
        return self._least(lambda row: row.run_s)

    @property
    def most_efficient(self) -> PlanRow | None:
        return self._least(lambda row: -row.efficiency)

    @property
    def knee(self) -> PlanRow | None:
        """Where time × money is least: beyond it money grows faster than time shrinks."""
        return self._least(lambda row: row.run_s * self.paid_s(row))

    def _least(self, value: Callable[[PlanRow], float], among: tuple[PlanRow, ...] | None = None) -> PlanRow | None:
        return min(self.rows if among is None else among, key=lambda row: (value(row), row.devices), default=None)

    def relative_cost(self, row: PlanRow) -> float:
        """Over the cheapest."""
        assert self.cheapest is not None
        return self.paid_s(row) / self.paid_s(self.cheapest)

    def gains_nothing(self, row: PlanRow) -> bool:
        """Another row is at least as fast and costs less."""
        return any(other.run_s <= row.run_s and self.paid_s(other) < self.paid_s(row) for other in self.rows)

    def verdict(self, row: PlanRow) -> str:
        """A few words on a row, beside the others; one alone needs none."""
        if (missed := self.wishes.violation_of(row)) or len(self.rows) == 1:
            return missed
        best = {"fastest": self.fastest}
        if not self.one_machine:
            best |= {"cheapest": self.cheapest, "knee": self.knee}
        if names := [name for name, of in best.items() if of is row]:
            return ", ".join(names[:2])  # what is fastest and cheapest is the knee too
        if self.gains_nothing(row):
            return "slower" if self.one_machine else "gains nothing"
        assert self.knee is not None
        return "past the knee" if row.devices > self.knee.devices else "pays"
