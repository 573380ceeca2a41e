"""The rows of a plan, one for each number of devices: what they cost, what they must meet, and which is best."""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import did_you_mean
from paceline.io.arguments import check_price, option_error
from paceline.io.format import number, percent
from paceline.planner.candidates import PricedLayout
from paceline.planner.search import SearchResult

if TYPE_CHECKING:
    from paceline.planner.plan import Plan

EQUALLY_FAST = 1.05  # times slower that still counts as equally fast: estimates are not better than that
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
CLAIM = re.compile(r"\s*([a-z_]+)\s*(<=|>=|<|>)\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*")
AMOUNTS = (
    *("devices", "speedup", "efficiency", "hours", "device_hours"),
    *("cost_usd", "spot_usd", "energy_kwh", "co2_kg"),
)
WORLD_G_PER_KWH, WORLD_SOURCE = 473.0, "the world's mean of 2024, Ember Global Electricity Review 2025"


@dataclass(frozen=True)
class HourlyRates:
    """USD per device and hour, None where not known, and the CO2 of the grid."""

    usd: float | None = None
    spot_usd: float | None = None  # of spot devices, which can be preempted
    take_spot: bool = False
    grid_g_per_kwh: float = WORLD_G_PER_KWH

    def resolve(self, defaults: "HourlyRates") -> "HourlyRates":
        """Check these rates and fill in the default ones; the default spot price only beside the default price."""
        for option, value in (("--price", self.usd), ("--spot-price", self.spot_usd)):
            check_price(value, option)
        if not 0 <= self.grid_g_per_kwh < math.inf:
            raise option_error("--grid", f"{self.grid_g_per_kwh:g} is not possible; give grams of CO2 per kWh")
        rates = self
        if self.usd is None:
            rates = replace(self, usd=defaults.usd, spot_usd=self.spot_usd or defaults.spot_usd)
        if not self.take_spot:
            return rates
        if rates.spot_usd is None:
            raise option_error("--spot-price", "not known for these devices; give  --spot-price USD", "missing-value")
        return replace(rates, usd=rates.spot_usd, spot_usd=None)


@dataclass(frozen=True)
class PlanRow:
    """One number of devices under its best layout."""

    found: SearchResult
    price: PricedLayout
    base: PricedLayout  # which speed-ups are counted from
    rates: HourlyRates
    steps: int | None  # of the whole run; None if not known
    pauses_s: Mapping[str, float] = field(default_factory=dict)  # of the whole run, between its steps
    one_machine: bool = False  # the devices are ranks that share one machine, which is paid for once

    @property
    def devices(self) -> int:
        return self.found.devices

    @property
    def speedup(self) -> float:
        """Samples per second over those of the base."""
        return self.base.step_s / self.price.step_s

    @property
    def efficiency(self) -> float:
        """Speed-up over that of as many devices without any loss."""
        return self.speedup * self.base.devices / self.devices

    @functools.cached_property
    def hours(self) -> float | None:
        if self.steps is None:
            return None
        return (self.price.start_s + self.steps * self.price.step_s + sum(self.pauses_s.values())) / 3600

    @property
    def hours_band(self) -> tuple[float, float] | None:
        """The hours between which the run ends, as published measurements lie around their plans."""
        band = self.price.find_band("time")
        return None if self.hours is None else (band.low * self.hours, band.high * self.hours)

    @property
    def device_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.paid_devices

    @property
    def paid_devices(self) -> int:
        return 1 if self.one_machine else self.devices

    @property
    def cost_usd(self) -> float | None:
        return self._compute_cost(self.rates.usd)

    @property
    def spot_usd(self) -> float | None:
        """The cost of the same hours on spot devices."""
        return self._compute_cost(self.rates.spot_usd)

    def _compute_cost(self, usd: float | None) -> float | None:
        return None if self.device_hours is None or usd is None else self.device_hours * usd

    @property
    def energy_kwh(self) -> float | None:
        watts = self.price.where.cluster.device.watts * self.devices
        return None if self.hours is None else self.hours * watts / 1e3

    @property
    def co2_kg(self) -> float | None:
        return None if self.energy_kwh is None else self.energy_kwh * self.rates.grid_g_per_kwh / 1e3

    @property
    def run_s(self) -> float:
        """What rows are compared by: the time of the whole run or, if its length is not known, of a step."""
        return self.price.step_s if self.hours is None else 3600 * self.hours

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in AMOUNTS},
            **self.price.as_json(),
            "hours_band": self.hours_band,
            "pauses_s": dict(self.pauses_s),
            "usual_tree": self.found.explain_choice(),
            "candidates": [p.as_json() for p in self.found.prices],
            "refused": [r.as_json() for r in self.found.rejected],
        }


@dataclass(frozen=True)
class Requirements:
    """What a row must meet; None leaves it open."""

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
                raise option_error(option, f"{value:g} is not possible; give more than 0{upto}")

    def check_answerable(self, has_hours: bool, has_price: bool) -> None:
        """Raise UserError for a requirement on hours or costs that are not known."""
        length = "train.steps=N  or  --samples N"
        if self.deadline_h is not None and not has_hours:
            raise option_error("--deadline", f"the length of the run is not known; give  {length}", "missing-value")
        if self.budget_usd is not None and not (has_hours and has_price):
            give = "--price USD" if has_hours else length
            raise option_error("--budget", f"the cost of the run is not known; give  {give}", "missing-value")

    def violation_of(self, row: PlanRow) -> str:
        """Return what a row does not meet, in few words, or ""."""
        if self.deadline_h is not None and (row.hours or 0) > self.deadline_h:
            return "too late"
        if self.budget_usd is not None and (row.cost_usd or 0) > self.budget_usd:
            return "over budget"
        if self.min_efficiency is not None and row.efficiency < self.min_efficiency:
            return f"below {percent(self.min_efficiency)}"
        return ""


@dataclass(frozen=True)
class RowRanking:
    """The rows of a plan by what they are best at."""

    rows: tuple[PlanRow, ...]
    requirements: Requirements = field(default_factory=Requirements)

    @property
    def one_machine(self) -> bool:
        return any(row.one_machine for row in self.rows)

    def paid_s(self, row: PlanRow) -> float:
        """Return the device-seconds, which the cost is proportional to."""
        return row.paid_devices * row.run_s

    @functools.cached_property
    def accepted(self) -> tuple[PlanRow, ...]:
        return tuple(row for row in self.rows if not self.requirements.violation_of(row))

    @property
    def chosen(self) -> PlanRow | None:
        """With a deadline the cheapest row that meets it, else the fastest; of equally fast ones, the smallest."""
        asked = self.requirements
        if not self.rows:
            return None
        if not self.accepted and asked.deadline_h is None:
            return self.cheapest if asked.budget_usd is not None else self.most_efficient
        if self.accepted and asked.deadline_h is not None:
            return self._least(self.paid_s, self.accepted)
        pool = self.accepted or self.rows
        best = min(row.run_s for row in pool)
        return next(row for row in pool if row.run_s <= best * EQUALLY_FAST)

    @property
    def cheapest(self) -> PlanRow | None:
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
        assert self.cheapest is not None
        return self.paid_s(row) / self.paid_s(self.cheapest)

    def is_dominated(self, row: PlanRow) -> bool:
        """Return whether another row is at least as fast and costs less."""
        return any(other.run_s <= row.run_s and self.paid_s(other) < self.paid_s(row) for other in self.rows)

    def verdict(self, row: PlanRow) -> str:
        """Compare a row with the others in a few words; a single row needs none."""
        if (violation := self.requirements.violation_of(row)) or len(self.rows) == 1:
            return violation
        best = {"fastest": self.fastest}
        if not self.one_machine:
            best |= {"cheapest": self.cheapest, "knee": self.knee}
        if names := [name for name, of in best.items() if of is row]:
            return ", ".join(names[:2])  # what is fastest and cheapest is the knee too
        if self.is_dominated(row):
            return "slower" if self.one_machine else "no advantage"
        assert self.knee is not None
        return "past the knee" if row.devices > self.knee.devices else "pays"


def find_failed_claims(plan: "Plan", claims: Sequence[str]) -> Iterator[str]:
    """Yield each claim that does not hold, with the value that the plan has instead."""
    if plan.chosen is None:
        yield from (f"{claim}: nothing fits" for claim in claims)
        return
    row = plan.chosen.as_json()
    flat = {**row.pop("time"), **row.pop("memory"), **row}
    values = {name: value for name, value in flat.items() if value is None or type(value) in (int, float)}
    for claim in claims:
        if claim.strip() == "fits":
            continue
        name, comparison, limit = _parse_claim(claim, values)
        value = values[name]
        if value is None or not COMPARISONS[comparison](value, limit):
            yield f"{claim}: {name} is {'not known' if value is None else number(value)}"


def _parse_claim(claim: str, values: dict[str, float | None]) -> tuple[str, str, float]:
    """Return the term, the comparison and the limit."""
    found = CLAIM.fullmatch(claim)
    if found is None or found[1] not in values:
        hint = did_you_mean(found[1] if found else claim, values)
        terms = "" if hint else f"; terms: {', '.join(sorted(values))}"
        problem = f"{claim!r} names no term of a plan{hint}; write it as  'step_s<0.5'  or  fits{terms}"
        raise option_error("--assert", problem)
    return found[1], found[2], float(found[3])
