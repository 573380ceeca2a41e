"""The verb `plan`: does it fit, will more devices pay, which layout, how long, how much."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import DEFAULT, RunSpec, SpecSource, resolve_spec
from paceline.errors import UserError
from paceline.io.tabular import Tabular
from paceline.planner.advice import explain_misfit
from paceline.planner.candidates import MEMORY_ERROR, LayoutConstraints, PricedLayout, RejectedFamily, RejectReason
from paceline.planner.cost_model import CostModel, build_cost_model
from paceline.planner.rows import HourlyRates, PlanRow, Requirements, RowRanking, build_plan_row
from paceline.planner.search import SearchResult, search_layouts
from paceline.planner.target import TargetCluster, resolve_target
from paceline.planner.what_if import WhatIf

MAX_ROWS = 8
MAX_DEVICES = 1 << 20
PLAN_FORMAT = 2


@dataclass(frozen=True)
class SpeedupCeilings:
    """What no number of devices can pass, for this batch."""

    serial_share: float
    """Of the base's step that does not shrink with the batch: launches, update."""
    amdahl: float | None
    """1 / serial share; None where nothing is serial."""
    communication: float | None
    """The base's step over the time that collectives are in flight on the most devices."""


@dataclass(frozen=True, repr=False)
class Plan(Tabular):
    """The answer. `chosen` is None where nothing fits; `overrides()` are the lines that apply it."""

    spec: RunSpec
    subject: CostModel
    site: TargetCluster
    limits: LayoutConstraints
    rates: HourlyRates
    base: PricedLayout | None
    """Which speed-ups are counted from: the fewest devices that hold the run; None where none do."""
    rows: tuple[PlanRow, ...]
    """The best layout of each number of devices, fewest first."""
    out: tuple[SearchResult, ...]
    """Numbers of devices on which nothing fits."""
    impossible: tuple[RejectedFamily, ...]
    """Numbers of devices that cannot be."""
    wishes: Requirements = field(default_factory=Requirements)
    what_if: WhatIf = field(default_factory=WhatIf)

    @property
    def headline(self) -> str:
        return f"{self.spec.name}: {self.advice[0] if self.advice else 'nothing fits'}"

    def rows_of_table(self) -> list[dict[str, Any]]:
        return [
            {
                "devices": row.devices,
                "layout": self.subject.layout_name(row.price),
                "step_s": row.price.step_s,
                "speedup": row.speedup,
                "efficiency": row.efficiency,
                "memory_bytes": row.price.memory.total_bytes,
                "hours": row.hours,
                "device_hours": row.device_hours,
                "cost_usd": row.cost_usd,
                "chosen": row is self.chosen,
            }
            for row in self.rows
        ]

    @property
    def fits(self) -> bool:
        return bool(self.rows)

    @functools.cached_property
    def choice(self) -> RowRanking:
        """The rows by what they are best at."""
        return RowRanking(self.rows, self.wishes)

    @functools.cached_property
    def chosen(self) -> PlanRow | None:
        """The row that is recommended, marked ✓."""
        return self.choice.chosen

    @property
    def usd_per_device_hour(self) -> float | None:
        return self.rates.usd

    @property
    def break_even(self) -> int | None:
        """The fewest devices that beat the base; None where none of those tried does."""
        return next((r.devices for r in self.rows if r.devices > r.base_devices and r.speedup > 1), None)

    @functools.cached_property
    def ceilings(self) -> SpeedupCeilings | None:
        """The serial part is what a step costs as its batch goes to nothing: a line through one and two samples."""
        if self.base is None:
            return None
        layout, where, whole_s = self.base.layout, self.base.where, self.base.step_s
        layouts = [replace(layout, global_batch=batch * layout.data, micro_batch=batch) for batch in (1, 2)]
        one, two = (self.subject.price(small, where).step_s for small in layouts)
        serial = max(0.0, min(1.0, (2 * one - two) / whole_s)) if layout.global_batch > 2 * layout.data else 1.0
        flight = self.rows[-1].price.time.comm_s
        return SpeedupCeilings(serial, 1 / serial if serial > 1e-9 else None, whole_s / flight if flight else None)

    @functools.cached_property
    def advice(self) -> tuple[str, ...]:
        return tuple(explain_misfit(self) if self.chosen is None else self.subject.advice(self))

    def overrides(self) -> dict[str, Any]:
        """The chosen layout as dotted values of the run file."""
        if self.what_if:
            raise UserError(f"--what-if is priced only: training does not do {self.what_if.words()}")
        if self.chosen is None:
            raise UserError(f"nothing fits: {self.advice[0] if self.advice else 'no layout was found'}")
        return self.subject.overrides(self.chosen.price.layout)

    def as_json(self) -> dict[str, Any]:
        """Every term of every row, as plain data."""
        best = {name: getattr(self.choice, name) for name in ("fastest", "cheapest", "most_efficient", "knee")}
        return {
            "format": PLAN_FORMAT,
            "run": self.subject.as_json(),
            "cluster": self.site.as_json(self.usd_per_device_hour),
            "physics": asdict(self.site.at(1).physics),
            "memory_error": MEMORY_ERROR,
            "base": self.base and self.base.as_json(),
            "wishes": asdict(self.wishes),
            "what_if": self.what_if.as_json(),
            "rows": [self._row_json(row) for row in self.rows],
            "does_not_fit": [{"devices": f.devices, "refused": [r.as_json() for r in f.refused]} for f in self.out],
            "impossible": [r.as_json() for r in self.impossible],
            "chosen": self.chosen
            and {"devices": self.chosen.devices, "overrides": {} if self.what_if else self.overrides()},
            **{f"{name}_devices": row and row.devices for name, row in best.items()},
            "break_even_devices": self.break_even,
            "ceilings": self.ceilings and asdict(self.ceilings),
            "advice": list(self.advice),
        }

    def _row_json(self, row: PlanRow) -> dict[str, Any]:
        cost, verdict = self.choice.relative_cost(row), self.choice.verdict(row)
        return {**row.as_json(), "relative_cost": cost, "verdict": verdict}


def plan(
    spec: SpecSource,
    cluster: str | None = None,
    devices: Sequence[int] = (),
    price: float | HourlyRates | None = None,
    *,
    samples: int | None = None,
    tokens: float | None = None,
    calibration: str | Path | None = None,
    wishes: Requirements | None = None,
    what_if: WhatIf | None = None,
) -> Plan:
    """Price a run (a spec, a run file, its content or a Workload class) on a cluster.

    `cluster` is local, a short form (`2x8xH100`) or a file; `price` is in USD per device and hour, or `Rates` with that
    of devices that may be taken away; `devices` are the numbers to try; `samples` and `tokens` say what the data are
    not there to say; `wishes` are a deadline, a budget and a least efficiency; `what_if` prices what is not run.
    """
    spec = resolve_spec(spec)
    site = resolve_target(cluster or spec.cluster, calibration)
    asked = price if isinstance(price, HourlyRates) else HourlyRates(price)
    rates = asked.checked().over(HourlyRates(site.whole.usd_per_device_hour, site.whole.spot_usd_per_device_hour))
    what_if = what_if or WhatIf()
    subject = what_if.applied(build_cost_model(spec, samples, tokens))
    device = site.whole.device
    if subject.numbers.matmul == "fp8" and not device.synchronous and "fp8" not in device.flops_s:
        raise UserError(f"train.precision=fp8: {device.name} has no fp8 in the catalogue; use train.precision=bf16")
    counts = _check_device_counts(devices) if devices else _choose_device_counts(site, subject)
    limits = subject.limits(spec)
    whole = _extend_target(site, counts[-1]) if devices else site
    found, impossible = _search_counts(subject, whole, counts, limits)
    base = _find_base(subject, whole, limits, found)
    wishes = wishes or Requirements()
    wishes.check_answerable(subject.steps is not None, rates.usd is not None)
    return Plan(
        spec=spec,
        subject=subject,
        site=site,
        limits=limits,
        rates=rates,
        base=base,
        rows=tuple(build_plan_row(f, base, subject, rates, site.shared) for f in found if base and f.chosen),
        out=tuple(f for f in found if f.chosen is None),
        impossible=tuple(impossible),
        wishes=wishes,
        what_if=what_if,
    )


def _check_device_counts(devices: Sequence[int]) -> list[int]:
    for n in devices:
        if n < 1:
            raise UserError(f"--devices: {n} devices cannot train; give 1 or more, as in  --devices 1,2,4")
        if n > MAX_DEVICES:
            raise UserError(f"--devices: {n} devices are more than any cluster has; give at most {MAX_DEVICES}")
    return sorted(set(devices))


def _choose_device_counts(site: TargetCluster, subject: CostModel) -> list[int]:
    """Numbers of devices to try: one, and the last doublings up to all that can be used."""
    most, per_node = site.devices, site.whole.per_node
    if subject.divides_samples_only and subject.global_batch < most:
        batch = subject.global_batch
        most = batch if batch <= per_node else batch - batch % per_node
    counts = {most, 1}
    step = 2 if most < 1 << MAX_ROWS else 4
    n = most
    while n > 1 and len(counts) < MAX_ROWS:
        n = n // step if n % step == 0 else 1 << max(0, n.bit_length() - step // 2)
        counts.add(max(1, n))
    return sorted(counts)


def _extend_target(site: TargetCluster, devices: int) -> TargetCluster:
    """A site with as many nodes as are asked for."""
    if site.shared or devices <= site.devices:
        return site
    return replace(site, whole=replace(site.whole, nodes=-(-devices // site.whole.per_node)))


def _find_base(
    subject: CostModel, site: TargetCluster, limits: LayoutConstraints, found: Sequence[SearchResult]
) -> PricedLayout | None:
    """The fewest devices that hold the run with its states on them, else in host memory; None where nothing fits.

    Doublings up to all that there are are tried beside those asked for, so that a row reads the same whatever stands
    around it.
    """
    if not any(f.chosen for f in found):
        return None
    known = {f.devices: f for f in found}
    kept = replace(limits, offload=False) if limits.offload is None else limits
    for offload, allowed in ((False, kept), (True, limits)):
        for n in sorted({*known, *(1 << k for k in range(site.devices.bit_length()))}):
            try:
                tried = (known.get(n) or search_layouts(subject, n, site.at(n), allowed)).chosen
            except UserError:  # not whole nodes
                continue
            if tried is not None and tried.layout.offload <= offload:
                return tried
    return None


def _search_counts(
    subject: CostModel, site: TargetCluster, counts: list[int], limits: LayoutConstraints
) -> tuple[list[SearchResult], list[RejectedFamily]]:
    found, impossible = [], []
    for n in counts:
        try:
            where = site.at(n)
        except UserError as error:
            impossible.append(RejectedFamily(n, f"{n} devices", RejectReason.NO_SUCH_CLUSTER, {"error": str(error)}))
            continue
        found.append(search_layouts(subject, n, where, limits))
    if not found:
        raise UserError(impossible[0].reason)
    return found, impossible


def apply_plan(spec: RunSpec, ranks: int | None) -> RunSpec:
    """`parallel: auto` on a named cluster, with the layout that the plan chooses written out.

    On this machine auto stays what it is. `ranks` is how many a launcher has started, if one has.
    """
    if spec.cluster == "local" or spec.parallel.strategy != "auto":
        return spec
    asked = ranks if ranks is not None or spec.origin("parallel.ranks") == DEFAULT else spec.parallel.ranks
    found = plan(spec, devices=(asked,) if asked else ())
    chosen = found.overrides()
    nodes = found.chosen.price.where.cluster.nodes if found.chosen else 1
    if ranks is None and nodes > 1:
        raise UserError(
            f"cluster: {spec.cluster}: the plan takes {chosen['parallel.ranks']} devices on {nodes} nodes, and this "
            "command starts ranks on one; make launch files with  paceline plan RUN.yaml --emit slurm  or  torchrun"
        )
    return spec.replace(chosen)
