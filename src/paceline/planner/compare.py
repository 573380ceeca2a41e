"""Compare a run on several clusters: one table of time, utilisation, memory and money."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.io.format import format_short_duration, percent, size, wrap_lines
from paceline.io.table import Column, Table, Tabular
from paceline.planner.plan import Plan
from paceline.planner.rows import PlanRow
from paceline.planner.show import format_cell_amount, format_multiple, format_run_time

FACTS = (
    *("layout", "step_s", "memory_bytes", "capacity_bytes", "epoch_s", "utilisation", "usd_per_hour"),
    *("devices", "hours", "device_hours", "cost_usd", "energy_kwh", "speedup", "efficiency"),
)


@dataclass(frozen=True)
class ClusterRow:
    """A run on all devices of one cluster, which it fits."""

    plan: Plan
    row: PlanRow

    @property
    def cluster(self) -> str:
        return self.plan.target.name

    def list_facts(self) -> dict[str, Any]:
        """Return `FACTS`: an epoch and a price that are not known are None, utilisation is the model's FLOPs (MFU)."""
        row, price, model, usd = self.row, self.row.price, self.plan.cost_model, self.plan.rates.usd
        steps = None if model.samples is None else math.ceil(model.samples / model.global_batch)
        peak = row.devices * price.where.cluster.device.peak_flops_s(model.numbers.matmul)
        found = {
            "layout": model.layout_name(price),
            "step_s": price.step_s,
            "memory_bytes": price.memory.total_bytes,
            "capacity_bytes": price.capacity_bytes,
            "epoch_s": None if steps is None else steps * price.step_s,
            "utilisation": model.flops_per_sample * price.samples_s / peak,
            "usd_per_hour": None if usd is None else usd * row.paid_devices,
        }
        return {name: found[name] if name in found else getattr(row, name) for name in FACTS}


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Plans of one run on several clusters, each on all of its devices."""

    plans: tuple[Plan, ...]

    @functools.cached_property
    def clusters(self) -> tuple[ClusterRow, ...]:
        """Those that it fits."""
        return tuple(ClusterRow(plan, plan.rows[-1]) for plan in self.plans if plan.rows)

    @functools.cached_property
    def priced(self) -> bool:
        """Whether money is known for all; otherwise device-hours are compared."""
        return all(entry.row.cost_usd is not None for entry in self.clusters)

    def cost(self, entry: ClusterRow) -> float:
        row = entry.row
        return row.cost_usd if self.priced and row.cost_usd is not None else row.paid_devices * row.run_s

    @functools.cached_property
    def fastest(self) -> ClusterRow | None:
        return min(self.clusters, key=lambda entry: (entry.row.run_s, self.cost(entry)), default=None)

    @functools.cached_property
    def cheapest(self) -> ClusterRow | None:
        return min(self.clusters, key=lambda entry: (self.cost(entry), entry.row.run_s), default=None)

    @functools.cached_property
    def chosen(self) -> ClusterRow | None:
        """The least time × money of those that meet the requirements; with a deadline, the cheapest of them."""
        requirements = self.plans[0].requirements
        accepted = [entry for entry in self.clusters if not requirements.violation_of(entry.row)] or self.clusters
        power = 1 if requirements.deadline_h is None else 0
        return min(accepted, key=lambda entry: self.cost(entry) * entry.row.run_s**power, default=None)

    def verdict(self, entry: ClusterRow) -> str:
        """Say in a few words what a cluster is best at, or where returns diminish."""
        if violation := entry.plan.requirements.violation_of(entry.row):
            return violation
        if names := [name for name in ("fastest", "cheapest") if getattr(self, name) is entry]:
            return ", ".join(names)
        run_s, cost = entry.row.run_s, self.cost(entry)
        if any(other.row.run_s <= run_s and self.cost(other) < cost for other in self.clusters):
            return "no advantage"
        assert self.chosen is not None
        return "pays" if entry is self.chosen or run_s >= self.chosen.row.run_s else "diminishing returns"

    @property
    def headline(self) -> str:
        """The recommended cluster, its time and cost, and what the fastest and the cheapest would be."""
        best = self.chosen
        if best is None:
            return "It fits on none of these clusters."
        others = {name: getattr(self, name) for name in ("fastest", "cheapest")}
        names = [name for name, entry in others.items() if entry is best]
        reason = f"the {' and '.join(names)}" if names else "the least time × money"
        more = [
            f"{entry.cluster} is the {name}: {_describe_amounts(entry.row)}"
            for name, entry in others.items()
            if entry is not best
        ]
        return f"{'. '.join([f'Take {best.cluster}, {reason}: {_describe_amounts(best.row)}', *more])}."

    def rows_of_table(self) -> list[dict[str, Any]]:
        least = self.cost(self.cheapest) if self.cheapest else 1.0
        rows = {
            id(entry.plan): {
                **entry.list_facts(),
                "relative_cost": self.cost(entry) / least,
                "verdict": self.verdict(entry),
                "chosen": entry is self.chosen,
            }
            for entry in self.clusters
        }
        none = {**dict.fromkeys((*FACTS, "relative_cost")), "verdict": "does not fit", "chosen": False}
        return [
            {"cluster": plan.target.name, "fits": bool(plan.rows), **rows.get(id(plan), none)} for plan in self.plans
        ]

    def as_json(self) -> dict[str, Any]:
        chosen = self.chosen.cluster if self.chosen else None
        plans = [plan.as_json() for plan in self.plans]
        return {"format": 1, "chosen": chosen, "clusters": self.rows_of_table(), "plans": plans}

    def build_table(self) -> Table:
        """Build the table; columns without a value for any cluster are left out."""
        columns = {
            "epoch": lambda v: format_short_duration(v["epoch_s"]),
            "total": lambda v: format_run_time(v["hours"]),
            "step": lambda v: format_short_duration(v["step_s"]),
            "speed-up": lambda v: format_multiple(self.clusters[0].row.run_s / v["run_s"]),
            "util.": lambda v: percent(v["utilisation"]),
            "memory": lambda v: f"{size(v['memory_bytes'])} ({percent(v['memory_bytes'] / v['capacity_bytes'])})",
            "USD/h": lambda v: f"{v['usd_per_hour']:,.2f}",
            "USD": lambda v: format_cell_amount(v["cost_usd"]),
            "cost": lambda v: format_multiple(v["relative_cost"]),
        }
        needs = {"epoch": "epoch_s", "total": "hours", "USD/h": "usd_per_hour", "USD": "cost_usd"}
        known = [values for values in self.rows_of_table() if values["fits"]]
        shown = [name for name in columns if name not in needs or any(v[needs[name]] is not None for v in known)]
        shown = [name for name in shown if name != "step" or "total" not in shown]
        table = Table("", "cluster", "layout", *shown, Column("verdict", "left"), left=3)
        for entry, values in zip(self.clusters, known, strict=True):
            values["run_s"] = entry.row.run_s
            cells = ["-" if name in needs and values[needs[name]] is None else columns[name](values) for name in shown]
            tick = "✓" if entry is self.chosen else " "
            style = "bold" if entry is self.chosen else ""
            table.add_row(tick, entry.cluster, values["layout"], *cells, values["verdict"], style=style)
        return table

    def render(self) -> Iterator[Any]:
        """Yield the recommendation, the table, and what does not fit."""
        yield from wrap_lines(f"{self.plans[0].cost_model.name}: {self.headline}", "")
        yield ""
        if self.clusters:
            yield self.build_table()
        for plan in self.plans:
            if not plan.rows:
                yield from wrap_lines(f"{plan.target.name}: {plan.advice[0]}", "✗  ")
        yield from wrap_lines(plan.cost_model.headline(), "")
        paid = "money" if self.priced else "device-hours, as not all prices are known"
        yield f"speed-ups are over the first row; cost is {paid}, over the cheapest; util. is the model's FLOPs (MFU)"


def _describe_amounts(row: PlanRow) -> str:
    step = f"{format_short_duration(row.price.step_s)} per step"
    time = step if row.hours is None else format_run_time(row.hours)
    return time if row.cost_usd is None else f"{time}, {format_cell_amount(row.cost_usd)} USD"
