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
from paceline.planner.show import format_cell_amount, format_multiple, format_run_time, list_known

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
        """Return `FACTS`; None is not known, utilisation is the model's FLOPs (MFU)."""
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
        """Return the clusters that the run fits on, each with its largest number of devices."""
        return tuple(ClusterRow(plan, plan.rows[-1]) for plan in self.plans if plan.rows)

    @functools.cached_property
    def priced(self) -> bool:
        """Return whether the cost in USD is known for all; otherwise device-hours are compared."""
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
        """Return in a few words what a cluster is best at, or where returns diminish."""
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
        none = {**dict.fromkeys((*FACTS, "relative_cost")), "verdict": "does not fit", "chosen": False}
        rows = [{"cluster": plan.target.name, "fits": plan.fits, **none} for plan in self.plans]
        for row, entry in zip((row for row in rows if row["fits"]), self.clusters, strict=True):
            row |= entry.list_facts()
            row |= {"relative_cost": self.cost(entry) / least, "verdict": self.verdict(entry)}
            row["chosen"] = entry is self.chosen
        return rows

    def as_json(self) -> dict[str, Any]:
        chosen = self.chosen.cluster if self.chosen else None
        plans = [plan.as_json() for plan in self.plans]
        return {"format": 1, "chosen": chosen, "clusters": self.rows_of_table(), "plans": plans}

    def build_table(self) -> Table:
        """Build the table; columns without a value for any cluster are left out."""
        cells = [self._format_row(entry) for entry in self.clusters]
        shown = list_known(cells)
        if "total" in shown:
            shown.remove("step")
        table = Table("cluster", "layout", *shown, Column("verdict", "left"), left=2, mark=True)
        for entry, values in zip(self.clusters, cells, strict=True):
            layout, chosen = entry.list_facts()["layout"], entry is self.chosen
            amounts = (values[column] for column in shown)
            style = "bold" if chosen else ""
            table.add_row(entry.cluster, layout, *amounts, self.verdict(entry), style=style, chosen=chosen)
        return table

    def _format_row(self, entry: ClusterRow) -> dict[str, str]:
        """Return the cells of a cluster, "-" where they are not known."""
        facts, row = entry.list_facts(), entry.row
        epoch_s, usd = facts["epoch_s"], facts["usd_per_hour"]
        room = percent(facts["memory_bytes"] / facts["capacity_bytes"])
        return {
            "epoch": "-" if epoch_s is None else format_short_duration(epoch_s),
            "total": format_run_time(row.hours),
            "step": format_short_duration(row.price.step_s),
            "speed-up": format_multiple(self.clusters[0].row.run_s / row.run_s),
            "util.": percent(facts["utilisation"]),
            "memory": f"{size(facts['memory_bytes'])} ({room})",
            "USD/h": "-" if usd is None else f"{usd:,.2f}",
            "USD": format_cell_amount(row.cost_usd),
            "cost": format_multiple(self.cost(entry) / self.cost(self.cheapest or entry)),
        }

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
