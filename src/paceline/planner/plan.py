"""`paceline.plan`: does a run fit, do more devices pay, which layout, how long, how much."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config import DEFAULT, RunSpec, SpecSource, resolve_spec
from paceline.errors import UserError
from paceline.hardware.failures import ExpectedRun, FailureModel, expect_run, resolve_failures
from paceline.io.arguments import option_error
from paceline.io.table import Tabular
from paceline.planner.advice import explain_misfit
from paceline.planner.candidates import PricedLayout, RejectedFamily, RejectReason
from paceline.planner.cost_model import CostModel, build_cost_model
from paceline.planner.formulas.simulation import Timeline
from paceline.planner.links import LinkLimits, find_link_limits
from paceline.planner.rows import HourlyRates, PlanRow, Requirements, RowRanking
from paceline.planner.search import SearchResult, search_layouts
from paceline.planner.target import TargetCluster, resolve_target

MAX_ROWS = 8
MAX_DEVICES = 1 << 20
PLAN_FORMAT = 3


@dataclass(frozen=True)
class SpeedupCeilings:
    """What no number of devices can exceed with this batch."""

    serial_share: float  # of the base's step that does not shrink with the batch: launches, update
    amdahl: float | None  # 1 / serial share; None if nothing is serial
    communication: float | None
    """The base's step over the time that collectives are in flight on the most devices."""


@dataclass(frozen=True, repr=False)
class Plan(Tabular):
    """The answer. `chosen` is None if nothing fits; `overrides()` are the settings that apply it."""

    spec: RunSpec
    cost_model: CostModel
    target: TargetCluster
    rates: HourlyRates
    base: PricedLayout | None
    """Which speed-ups are counted from: the fewest devices that hold the run; None if none do."""
    rows: tuple[PlanRow, ...]  # the best layout of each number of devices, fewest first
    misfits: tuple[SearchResult, ...]  # numbers of devices on which nothing fits
    impossible: tuple[RejectedFamily, ...]  # numbers of devices that the cluster cannot provide
    requirements: Requirements = field(default_factory=Requirements)
    failures: FailureModel = field(default_factory=FailureModel)

    @property
    def headline(self) -> str:
        return f"{self.spec.name}: {self.advice[0] if self.advice else 'nothing fits'}"

    def rows_of_table(self) -> list[dict[str, Any]]:
        names = ("speedup", "efficiency", "hours", "device_hours", "cost_usd")
        return [
            {
                "devices": row.devices,
                "layout": self.cost_model.layout_name(row.price),
                "step_s": row.price.step_s,
                "memory_bytes": row.price.memory.total_bytes,
                **{name: getattr(row, name) for name in names},
                "chosen": row is self.chosen,
            }
            for row in self.rows
        ]

    @property
    def fits(self) -> bool:
        return bool(self.rows)

    @functools.cached_property
    def ranking(self) -> RowRanking:
        return RowRanking(self.rows, self.requirements)

    @functools.cached_property
    def chosen(self) -> PlanRow | None:
        return self.ranking.chosen

    @property
    def break_even(self) -> int | None:
        """The fewest devices that beat the base; None if none of those tried does."""
        return next((r.devices for r in self.rows if r.devices > r.base.devices and r.speedup > 1), None)

    @functools.cached_property
    def ceilings(self) -> SpeedupCeilings | None:
        """Return the limits of speedup; the serial part is a step without samples, by a line through one and two."""
        if self.base is None:
            return None
        layout, where, whole_s = self.base.layout, self.base.where, self.base.step_s
        layouts = [replace(layout, global_batch=batch * layout.data, micro_batch=batch) for batch in (1, 2)]
        one, two = (self.cost_model.price(small, where).step_s for small in layouts)
        serial = max(0.0, min(1.0, (2 * one - two) / whole_s)) if layout.global_batch > 2 * layout.data else 1.0
        flight = self.rows[-1].price.time.comm_s
        return SpeedupCeilings(serial, 1 / serial if serial > 1e-9 else None, whole_s / flight if flight else None)

    @functools.cached_property
    def links(self) -> LinkLimits | None:
        """Return what the links between devices decide; None if nothing travels over them."""
        return find_link_limits(self)

    @functools.cached_property
    def advice(self) -> tuple[str, ...]:
        return tuple(explain_misfit(self) if self.chosen is None else self.cost_model.advice(self))

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        """Return a simulated step of the chosen layout; None if there is none."""
        return self.cost_model.timeline(self.chosen.price) if self.chosen else None

    def as_trace(self) -> dict[str, Any]:
        """Return the timeline as a Chrome trace."""
        if self.chosen is None or self.timeline is None:
            raise UserError(f"no step to play: {self.headline}", code="not-supported", key="--trace")
        layout = self.chosen.price.layout
        return self.timeline.as_trace(layout.ranks // layout.pipeline)

    def expect(self, row: PlanRow) -> ExpectedRun | None:
        """Return the hours of a row with its failures; None if they cannot be known."""
        save_s, every = self.cost_model.save_s(row.price), self.cost_model.checkpoint_steps()
        if row.hours is None or save_s is None or self.target.shared:
            return None
        work_s = 3600 * row.hours - row.pauses_s.get("checkpoint_s", 0.0)
        interval_s = every and every * row.price.step_s
        spread = row.price.where.physics.spread
        return expect_run(self.failures, row.devices, work_s, save_s, interval_s, spread)

    def overrides(self) -> dict[str, Any]:
        """Return the chosen layout as dotted values of the run file."""
        if self.chosen is None:
            raise UserError(self.advice[0], code="does-not-fit")
        return self.cost_model.overrides(self.chosen.price.layout)

    def as_json(self) -> dict[str, Any]:
        best = {name: getattr(self.ranking, name) for name in ("fastest", "cheapest", "most_efficient", "knee")}
        return {
            "format": PLAN_FORMAT,
            "run": self.cost_model.as_json(),
            "cluster": self.target.as_json(self.rates.usd),
            "physics": asdict(self.target.at(1).physics),
            "base": self.base and self.base.as_json(),
            "wishes": asdict(self.requirements),
            "failures": asdict(self.failures),
            "rows": [
                {
                    **row.as_json(),
                    "relative_cost": self.ranking.relative_cost(row),
                    "verdict": self.ranking.verdict(row),
                    "expected": (found := self.expect(row)) and asdict(found),
                }
                for row in self.rows
            ],
            "does_not_fit": [
                {"devices": found.devices, "refused": [r.as_json() for r in found.rejected]} for found in self.misfits
            ],
            "impossible": [r.as_json() for r in self.impossible],
            "chosen": self.chosen and {"devices": self.chosen.devices, "overrides": self.overrides()},
            "simulated_step_s": self.timeline and self.timeline.step_s,
            **{f"{name}_devices": row and row.devices for name, row in best.items()},
            "break_even_devices": self.break_even,
            "ceilings": self.ceilings and asdict(self.ceilings),
            "links": self.links and asdict(self.links),
            "advice": list(self.advice),
        }


def plan(
    spec: SpecSource,
    cluster: str | None = None,
    devices: Sequence[int] = (),
    price: float | HourlyRates | None = None,
    *,
    samples: int | None = None,
    tokens: float | None = None,
    calibration: str | Path | None = None,
    requirements: Requirements | None = None,
    mtbf_h: float | None = None,
    restart_s: float | None = None,
) -> Plan:
    """Price a run (a spec, a run file, its content or a Workload class) on a cluster.

    `cluster` is local, a short form (`2x8xH100`) or a file; `price` is in USD per device and hour, or `HourlyRates`
    with that of spot devices; `devices` are the numbers to try; `samples` and `tokens` replace what the data would
    say; `requirements` are a deadline, a budget and a least efficiency.
    `mtbf_h` is the mean time between failures of one device, `restart_s` the time from a failure to the next new step.
    """
    spec = resolve_spec(spec)
    target = resolve_target(cluster or spec.cluster, calibration)
    asked = price if isinstance(price, HourlyRates) else HourlyRates(price)
    rates = asked.resolve(HourlyRates(target.whole.usd_per_device_hour, target.whole.spot_usd_per_device_hour))
    cost_model = build_cost_model(spec, samples, tokens)
    device = target.whole.device
    if cost_model.numbers.matmul == "fp8" and not device.synchronous and "fp8" not in device.flops_s:
        problem = f"{device.name} has no fp8 in the catalogue; use train.precision=bf16"
        raise option_error("train.precision", problem, "not-supported")
    if wrong := [n for n in devices if not 1 <= n <= MAX_DEVICES]:
        raise option_error("--devices", f"{wrong[0]} devices are not possible; give 1 to {MAX_DEVICES}")
    counts = sorted(set(devices)) or _choose_device_counts(target, cost_model)
    whole = target
    if counts[-1] > target.devices and not target.shared:
        nodes = -(-counts[-1] // target.whole.per_node)
        whole = replace(target, whole=replace(target.whole, nodes=nodes))
    found, impossible = _search_counts(cost_model, whole, counts)
    base = _find_base(cost_model, whole, found)
    requirements = requirements or Requirements()
    requirements.check_answerable(cost_model.steps is not None, rates.usd is not None)
    return Plan(
        spec=spec,
        cost_model=cost_model,
        target=target,
        rates=rates,
        base=base,
        rows=tuple(
            PlanRow(one, one.chosen, base, rates, cost_model.steps, cost_model.pauses_s(one.chosen), target.shared)
            for one in found
            if base and one.chosen
        ),
        misfits=tuple(one for one in found if one.chosen is None),
        impossible=tuple(impossible),
        requirements=requirements,
        failures=resolve_failures(device, mtbf_h, restart_s),
    )


def _choose_device_counts(target: TargetCluster, cost_model: CostModel) -> list[int]:
    """Choose the numbers of devices to try: one, and the last doublings up to all that can be used."""
    most, per_node = target.devices, target.whole.per_node
    if cost_model.divides_samples_only and cost_model.global_batch < most:
        batch = cost_model.global_batch
        most = batch if batch <= per_node else batch - batch % per_node
    counts = {most, 1}
    step = 2 if most < 1 << MAX_ROWS else 4
    n = most
    while n > 1 and len(counts) < MAX_ROWS:
        n = n // step if n % step == 0 else 1 << max(0, n.bit_length() - step // 2)
        counts.add(max(1, n))
    return sorted(counts)


def _find_base(cost_model: CostModel, target: TargetCluster, found: Sequence[SearchResult]) -> PricedLayout | None:
    """Find the fewest devices that hold the run with its states on them, else in host memory.

    All doublings are tried besides the numbers asked for, so that a row does not depend on the others.
    """
    if not any(one.chosen for one in found):
        return None
    known, fixed, on_device = {one.devices: one for one in found}, cost_model.constraints, cost_model
    if fixed.offload is None:
        on_device = replace(cost_model, constraints=replace(fixed, offload=False))
    for offload, model in ((False, on_device), (True, cost_model)):
        for n in sorted({*known, *(1 << k for k in range(target.devices.bit_length()))}):
            try:
                tried = (known.get(n) or search_layouts(model, n, target.at(n))).chosen
            except UserError:  # not whole nodes
                continue
            if tried is not None and tried.layout.offload <= offload:
                return tried
    return None


def _search_counts(
    cost_model: CostModel, target: TargetCluster, counts: list[int]
) -> tuple[list[SearchResult], list[RejectedFamily]]:
    found, impossible = [], []
    for n in counts:
        try:
            where = target.at(n)
        except UserError as error:
            impossible.append(RejectedFamily(n, f"{n} devices", RejectReason.NO_SUCH_CLUSTER, {"error": str(error)}))
            continue
        found.append(search_layouts(cost_model, n, where))
    if not found:
        raise UserError(impossible[0].reason, code="invalid-value", key="--devices")
    return found, impossible


def apply_plan(spec: RunSpec, ranks: int | None) -> RunSpec:
    """Write the layout that the plan chooses into a spec with `parallel: auto` on a named cluster.

    On this machine auto stays as it is. `ranks` is how many a launcher has started, if one has.
    """
    if spec.cluster == "local" or spec.parallel.strategy != "auto":
        return spec
    asked = ranks if ranks is not None or spec.origin("parallel.ranks") == DEFAULT else spec.parallel.ranks
    found = plan(spec, devices=(asked,) if asked else ())
    chosen = found.overrides()
    nodes = found.chosen.price.where.cluster.nodes if found.chosen else 1
    if ranks is None and nodes > 1:
        problem = f"the plan takes {chosen['parallel.ranks']} devices on {nodes} nodes"
        use = "this command starts ranks on one; make launch files with  paceline plan RUN.yaml --emit slurm"
        raise option_error("cluster", f"{problem}, and {use}  or  torchrun", "not-supported")
    return spec.replace(chosen)
