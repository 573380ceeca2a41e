"""The cost model of boosted trees: a step is a round over all rows, which ranks divide among them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.io.format import duration, size
from paceline.layout import Layout
from paceline.planner.advice import advise_few_devices, format_times
from paceline.planner.candidates import PricedLayout
from paceline.planner.cost_model import TIME_TERMS, PassCostModel, PlanWording, rows_per_rank
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.placement import DTYPE_SIZES
from paceline.planner.formulas.step_time import StepTime, all_reduce_s, build_group
from paceline.planner.target import PricedCluster

if TYPE_CHECKING:
    from paceline.planner.plan import Plan

OPERATION_FLOPS = {"values": 53.5, "levels": 2010.0, "lines": 3250.0, "bins": 563.0}
"""Plain operations in whose time a rank adds a value to a histogram, finds a row's gradient and its side of a split,
fetches a line of memory that is not in the cache, and clears, adds up and tries a bin of a node."""
LEVEL_S = 1.5e-4  # for threads to begin a level together; `benchmarks/trees.py plan --fit` finds these
CACHE_BYTES, LINE_BYTES = 13e6, 64  # of the last cache, about what a rank has for itself
SKETCH_FLOPS, BINNING_FLOPS = 6000.0, 3000.0  # for a value, once: in finding bins, and in finding its bin
START_S = 0.5
BIN_BYTES = GRADIENT_BYTES = 16.0  # sums of gradients and hessians; those of a row, and its number
FEWEST_ROWS = 19  # of a leaf, about, where a tree has as many levels as it wants
DEFAULT_LEVELS = {"xgboost": 6, "lightgbm": 5}  # LightGBM's 31 leaves are five


@dataclass(frozen=True)
class TreesShape:
    """The sizes of a table and its trees that time and memory depend on."""

    rows: int
    columns: int
    bins: float
    gaps: bool
    levels: int
    outputs: int
    bin_rows: int

    @property
    def nodes(self) -> float:
        """Return the number of nodes of a tree, which has fewer leaves than its levels allow where rows run out."""
        return 2 / (2.0**-self.levels + FEWEST_ROWS / self.rows) - 1

    @property
    def row_bytes(self) -> float:
        """Return the bytes of a row's bins: 1 each, or 4 if values are missing: bins then count over all columns."""
        return self.columns * (4.0 if self.gaps else 1.0)

    def operations(self, rows: float) -> dict[str, float]:
        """Count a round's operations, by `PRICES`. Of two siblings the smaller is summed; the other is what is left of
        their parent. Below the root, rows are no longer visited in the order in which they lie in memory."""
        again = (self.levels - 1) / 2
        outside = max(0.0, 1 - CACHE_BYTES / (rows * (self.row_bytes + GRADIENT_BYTES)))
        found = {
            "values": rows * self.columns * (1 + again),
            "levels": rows * self.levels,
            "lines": rows * again * (1 + self.row_bytes / LINE_BYTES) * outside,
            "bins": self.nodes * self.bins,
        }
        return {name: self.outputs * count for name, count in found.items()}

    @property
    def starts(self) -> float:
        return self.outputs * (self.levels + 1.0)

    def work_flops(self, rows: float) -> float:
        return sum(OPERATION_FLOPS[name] * count for name, count in self.operations(rows).items())

    @property
    def sent_bytes(self) -> float:
        return self.outputs * self.nodes / 4 * self.bins * BIN_BYTES


@dataclass(frozen=True)
class TreesMemory(DeviceMemory):
    table_bytes: float
    rows_bytes: float
    sums_bytes: float
    context_bytes: float

    terms: ClassVar[Mapping[str, str]] = {
        "table_bytes": "the binned table",
        "rows_bytes": "gradients, margins, labels",
        "sums_bytes": "histograms",
        "context_bytes": "driver, libraries",
    }
    divided: ClassVar[Mapping[str, int]] = {"table_bytes": 0, "rows_bytes": 0}


@dataclass(frozen=True, kw_only=True)
class TreesCostModel(PassCostModel):
    grown: TreesShape
    on_disk: bool

    model: ClassVar[str] = "a sum of trees"
    wording: ClassVar[PlanWording] = replace(
        PassCostModel.wording,
        layout="table",
        step="round",
        batch="this table",
        times={**TIME_TERMS, "compute_s": "histograms and splits", "exposed_s": "histograms over ranks"},
        to_fit="Take {devices}, or leave the table on disk with  data.memory=disk.",
    )

    @property
    def params(self) -> float:
        return float(self.grown.outputs * self.grown.nodes * (self.steps or 1))

    @property
    def flops_per_sample(self) -> float:
        return self.grown.work_flops(self.grown.rows) / self.grown.rows

    def headline(self) -> str:
        table = f"{self.grown.rows:,} rows × {self.grown.columns:,} columns"
        return f"{self.name}: {table}, {self.steps:,} rounds of {self.grown.levels} levels"

    def layout_name(self, price: PricedLayout) -> str:
        return "on disk" if self.on_disk else "in memory"

    def memory(self, layout: Layout, where: PricedCluster) -> TreesMemory:
        rows, grown = rows_per_rank(layout), self.grown
        return TreesMemory(
            table_bytes=0.0 if self.on_disk else rows * (grown.row_bytes + grown.columns),
            rows_bytes=rows * (24.0 + 12.0 * grown.outputs),
            sums_bytes=grown.nodes * grown.bins * BIN_BYTES,
            context_bytes=where.physics.context_bytes,
        )

    def price(self, layout: Layout, where: PricedCluster) -> PricedLayout:
        rows, grown, physics = rows_per_rank(layout), self.grown, where.physics
        plain = where.cluster.device.peak_flops_s("fp32")
        work = grown.work_flops(rows) / plain + grown.starts * LEVEL_S
        members = build_group(layout.ranks, 1, where.cluster, physics)
        comm = all_reduce_s(grown.sent_bytes, members, physics, grown.starts)
        memory = self.memory(layout, where)
        streamed = rows * grown.columns * grown.levels / physics.input_bytes_s if self.on_disk else 0.0
        time = StepTime(work, comm, exposed_s=comm, data_s=max(0.0, streamed - work))
        values = min(grown.bin_rows, grown.rows) * SKETCH_FLOPS + rows * BINNING_FLOPS
        return PricedLayout(layout, where, time, memory, START_S + values * grown.columns / plain)

    def advice(self, plan: "Plan") -> Iterator[str]:
        assert plan.chosen is not None
        chosen, time = plan.chosen, plan.chosen.price.time
        lost = f"wait {duration(plan.rows[-1].price.time.exposed_s)} for the histograms of the others"
        yield from advise_few_devices(plan, "rank", "a round", lost)
        if chosen.devices > 1:
            sums = f"{duration(time.comm_s)} to add up {size(self.grown.sent_bytes)} of histograms"
            speed = format_times(chosen.speedup)
            yield f"{chosen.devices} ranks will run at {speed}: a round takes {duration(time.compute_s)}, and {sums}."


def build_trees_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> TreesCostModel:
    if tokens is not None:
        raise UserError("--tokens: a table has no texts; leave it out", code="not-supported", key="--tokens")
    steps = spec.train.steps or spec.train.epochs
    if not steps:
        message = "the number of rounds is missing; give it as  train.steps=200"
        raise UserError(message, code="missing-value", key="train.steps")
    grown, assumptions = _shape_of(spec, samples)
    return TreesCostModel(
        name=spec.name,
        workload=spec.workload,
        global_batch=grown.rows,
        numbers=DTYPE_SIZES["fp32"],
        steps=steps,
        samples=grown.rows,
        unit="rows",
        assumptions=tuple(assumptions),
        grown=grown,
        on_disk=getattr(spec.data, "memory", "") == "disk",
    )


def _shape_of(spec: RunSpec, samples: int | None) -> tuple[TreesShape, list[str]]:
    model: Any = spec.model
    data: Any = spec.data
    levels = model.max_depth or (model.max_leaves.bit_length() if model.max_leaves else DEFAULT_LEVELS[model.library])
    if samples is not None:
        bins = float(data.columns * (model.max_bin or 256))
        assumed = [f"{data.columns} columns of numbers (set by data.columns=N), two classes"]
        return TreesShape(samples, data.columns, bins, False, levels, 1, data.bin_rows), assumed
    from paceline.data.prepared_table import choose_target, probe_table
    from paceline.workloads.trees.sections import BY_NAME

    facts, seen = probe_table(data)
    sizes = (facts.rows, len(facts.columns), float(facts.bins), facts.gaps)
    assumed = [f"about {facts.rows:,} rows like the first {seen:,}, which were read"] if seen else []
    try:
        outputs = choose_target(model.objective, BY_NAME.get(model.objective), data.label, facts).outputs
    except UserError:
        if not seen:
            raise
        outputs = max(1, len(facts.classes))  # the first rows may lack a class
    return TreesShape(*sizes, levels, outputs, data.bin_rows), assumed
