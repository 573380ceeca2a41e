"""Compare a run on several clusters: one table of time, utilisation, memory and money."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.io.format import format_short_duration, percent, size, wrap_lines
from paceline.io.table import Column, Table, Tabular
from paceline.planner.plan import Plan
from paceline.planner.rows import PlanRow
from paceline.planner.show import format_cell_amount, format_multiple, format_run_time


@dataclass(frozen=True)
class ClusterRow:
    """A run on all devices of one cluster."""

    plan: Plan
    row: PlanRow | None  # None if it does not fit

    @property
    def cluster(self) -> str:
        return self.plan.target.name

    @property
    def epoch_s(self) -> float | None:
        """Time of one pass over the samples; None if their number is not known."""
        samples = self.plan.cost_model.samples
        if self.row is None or samples is None:
            return None
        return math.ceil(samples / self.plan.cost_model.global_batch) * self.row.price.step_s

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs over what the devices could do in the same time (MFU)."""
        if self.row is None:
            return None
        model, device = self.plan.cost_model, self.row.price.where.cluster.device
        peak = self.row.devices * device.peak_flops_s(model.numbers.matmul)
        return model.flops_per_sample * self.row.price.samples_s / peak

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all devices."""
        return None if self.row is None or (usd := self.plan.rates.usd) is None else usd * self.row.paid_devices

    def as_json(self) -> dict[str, Any]:
        row = self.row
        names = ("devices", "hours", "device_hours", "cost_usd", "energy_kwh", "speedup", "efficiency")
        return {
            "cluster": self.cluster,
            "fits": row is not None,
            "layout": self.plan.cost_model.layout_name(row.price) if row else None,
            "step_s": row.price.step_s if row else None,
            "memory_bytes": row.price.memory.total_bytes if row else None,
            "capacity_bytes": row.price.capacity_bytes if row else None,
            **{name: getattr(self, name) for name in ("epoch_s", "utilisation", "usd_per_hour")},
            **{name: getattr(row, name) if row else None for name in names},
        }


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Plans of one run on several clusters, each on all of its devices."""

    clusters: tuple[ClusterRow, ...]

    @functools.cached_property
    def fitting(self) -> list[tuple[ClusterRow, PlanRow]]:
        return [(entry, entry.row) for entry in self.clusters if entry.row is not None]

    @property
    def priced(self) -> bool:
        """Whether money is known for all; otherwise device-hours are compared."""
        return all(row.cost_usd is not None for _, row in self.fitting)

    def cost(self, row: PlanRow) -> float:
        return row.cost_usd if self.priced and row.cost_usd is not None else row.paid_devices * row.run_s

    @functools.cached_property
    def fastest(self) -> ClusterRow | None:
        return min(self.fitting, key=lambda pair: (pair[1].run_s, self.cost(pair[1])), default=(None,))[0]

    @functools.cached_property
    def cheapest(self) -> ClusterRow | None:
        return min(self.fitting, key=lambda pair: (self.cost(pair[1]), pair[1].run_s), default=(None,))[0]

    @functools.cached_property
    def chosen(self) -> ClusterRow | None:
        """The least time × money of those that meet the requirements; with a deadline, the cheapest of them."""
        requirements = self.clusters[0].plan.requirements
        accepted = [pair for pair in self.fitting if not requirements.violation_of(pair[1])] or self.fitting
        power = 1 if requirements.deadline_h is None else 0
        return min(accepted, key=lambda pair: self.cost(pair[1]) * pair[1].run_s ** power, default=(None,))[0]

    def verdict(self, entry: ClusterRow) -> str:
        """Say in a few words what a cluster is best at, or where returns diminish."""
        row, best = entry.row, self.chosen
        if row is None or best is None or best.row is None:
            return "does not fit"
        if violation := entry.plan.requirements.violation_of(row):
            return violation
        if names := [name for name in ("fastest", "cheapest") if getattr(self, name) is entry]:
            return ", ".join(names)
        if any(other.run_s <= row.run_s and self.cost(other) < self.cost(row) for _, other in self.fitting):
            return "no advantage"
        return "pays" if entry is best or row.run_s >= best.row.run_s else "diminishing returns"

    @property
    def headline(self) -> str:
        """The recommended cluster, its time and cost, and what the fastest and the cheapest would be."""
        best = self.chosen
        if best is None or best.row is None:
            return "It fits on none of these clusters."
        others = {name: getattr(self, name) for name in ("fastest", "cheapest")}
        names = [name for name, entry in others.items() if entry is best]
        reason = f"the {' and '.join(names)}" if names else "the least time × money"
        more = [
            f"{entry.cluster} is the {name}: {self._describe_amounts(entry)}"
            for name, entry in others.items()
            if entry is not None and entry is not best
        ]
        return f"{'. '.join([f'Take {best.cluster}, {reason}: {self._describe_amounts(best)}', *more])}."

    def _describe_amounts(self, entry: ClusterRow) -> str:
        assert entry.row is not None
        row = entry.row
        step = f"{format_short_duration(row.price.step_s)} per step"
        time = step if row.hours is None else format_run_time(row.hours)
        return time if row.cost_usd is None else f"{time}, {format_cell_amount(row.cost_usd)} USD"

    def rows_of_table(self) -> list[dict[str, Any]]:
        least = self.cost(self.cheapest.row) if self.cheapest and self.cheapest.row else 1.0
        return [
            {
                **entry.as_json(),
                "relative_cost": self.cost(entry.row) / least if entry.row else None,
                "verdict": self.verdict(entry),
                "chosen": entry is self.chosen,
            }
            for entry in self.clusters
        ]

    def as_json(self) -> dict[str, Any]:
        chosen = self.chosen.cluster if self.chosen else None
        plans = [entry.plan.as_json() for entry in self.clusters]
        return {"format": 1, "chosen": chosen, "clusters": self.rows_of_table(), "plans": plans}

    def build_table(self) -> Table:
        """Build the table; columns without a value for any cluster are left out."""
        columns = {
            "epoch": lambda v: format_short_duration(v["epoch_s"]),
            "total": lambda v: format_run_time(v["hours"]),
            "step": lambda v: format_short_duration(v["step_s"]),
            "speed-up": lambda v: format_multiple(self.fitting[0][1].run_s / v["run_s"]),
            "util.": lambda v: percent(v["utilisation"]),
            "memory": lambda v: f"{size(v['memory_bytes'])} ({percent(v['memory_bytes'] / v['capacity_bytes'])})",
            "USD/h": lambda v: f"{v['usd_per_hour']:,.2f}",
            "USD": lambda v: format_cell_amount(v["cost_usd"]),
            "cost": lambda v: format_multiple(v["relative_cost"]),
        }
        needs = {"epoch": "epoch_s", "total": "hours", "USD/h": "usd_per_hour", "USD": "cost_usd"}
        rows = self.rows_of_table()
        known = [values for values in rows if values["fits"]]
        shown = [name for name in columns if name not in needs or any(v[needs[name]] is not None for v in known)]
        shown = [name for name in shown if name != "step" or "total" not in shown]
        table = Table("", "cluster", "layout", *shown, Column("verdict", "left"), left=3)
        for entry, values in zip(self.clusters, rows, strict=True):
            if entry.row is None:
                continue
            values["run_s"] = entry.row.run_s
            cells = ["-" if name in needs and values[needs[name]] is None else columns[name](values) for name in shown]
            tick = "✓" if entry is self.chosen else " "
            style = "bold" if entry is self.chosen else ""
            table.add_row(tick, entry.cluster, values["layout"], *cells, values["verdict"], style=style)
        return table

    def render(self) -> Iterator[Any]:
        """Yield the recommendation, the table, and what does not fit."""
        yield from wrap_lines(f"{self.clusters[0].plan.cost_model.name}: {self.headline}", "")
        yield ""
        if self.fitting:
            yield self.build_table()
        for entry in self.clusters:
            if entry.row is None:
                yield from wrap_lines(f"{entry.cluster}: {entry.plan.advice[0]}", "✗  ")
        yield from wrap_lines(entry.plan.cost_model.headline(), "")
        paid = "money" if self.priced else "device-hours, as not all prices are known"
        yield f"speed-ups are over the first row; cost is {paid}, over the cheapest; util. is the model's FLOPs (MFU)"


def compare_clusters(plans: Sequence[Plan]) -> Comparison:
    """Compare plans that were each made for all devices of their cluster."""
    return Comparison(tuple(ClusterRow(plan, plan.rows[-1] if plan.rows else None) for plan in plans))
