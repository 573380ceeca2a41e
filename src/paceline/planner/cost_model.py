"""What a run file asks to be priced, whatever kind of work it is: the questions that a plan asks of it.

Two kinds answer them: a fit by passes over all of its data (here) and a training by gradient descent (`training.py`).
Each workload says in its own folder what it is. What the run file does not say, and the data are not there to say, is
assumed and listed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.config import RunSpec
from paceline.config.registry import RECORDED_ENTRY, import_object
from paceline.config.sections import MOST
from paceline.errors import UserError
from paceline.hardware.catalogue import Cluster
from paceline.layout import Layout
from paceline.planner.candidates import (
    LayoutConstraints,
    LayoutFamily,
    PricedLayout,
    RejectedFamily,
    RejectReason,
    constraints_of,
)
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.placement import DtypeSizes
from paceline.planner.target import PricedCluster

if TYPE_CHECKING:
    from paceline.planner.plan import Plan

TRACED_COST_MODEL = "paceline.planner.tracing:build_traced_cost_model"
"""The subject of a workload that has no formulas of its own: its model is tried out."""
TIME_TERMS = {
    "data_s": "waiting for input",
    "compute_s": "forward and backward",
    "exposed_s": "communication not hidden",
    "bubble_s": "idle pipeline stages",
    "update_s": "the optimiser",
    "overhead_s": "launches around it",
    "offload_s": "to the host and back",
    "waiting_s": "for the slowest rank",
}
"""What the terms of a step are."""


@dataclass(frozen=True)
class PlanWording:
    """The words of a plan's tables that depend on the kind of work."""

    layout: str = "layout"
    """Head of the column that tells rows apart."""
    step: str = "step"
    total: str = "hours"
    """Head of the column of the whole run's length."""
    durations: bool = False
    """That column has its own units, as runs may be short."""
    batch: str = "this batch"
    times: Mapping[str, str] = field(default_factory=lambda: TIME_TERMS)
    several_layouts: bool = True
    """There are layouts to choose from on a number of devices, so they are shown."""
    to_fit: str = (
        "Take more devices or larger ones, a smaller train.global_batch, or leave more of `parallel` to the search."
    )
    """What to do where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class CostModel(ABC):
    """All that prices depend on besides layout and cluster."""

    name: str
    workload: str
    global_batch: int
    """Samples that a step works on."""
    numbers: DtypeSizes
    steps: int | None
    """Of the whole run; None where the number of samples is not known."""
    samples: int | None = None
    unit: str = "samples"
    units_per_sample: float = 1.0
    assumptions: tuple[str, ...] = ()

    wording: ClassVar[PlanWording] = PlanWording()

    @property
    @abstractmethod
    def params(self) -> float: ...

    @property
    def trained_params(self) -> float:
        """Those that are updated; others are frozen."""
        return self.params

    @property
    def stored_params(self) -> float:
        """By the bytes they take, in full ones: frozen ones may be kept in 16 bits."""
        return self.params

    @property
    @abstractmethod
    def flops_per_sample(self) -> float:
        """Of a step."""

    @property
    def divides_samples_only(self) -> bool:
        """Every rank needs a sample: there cannot be more ranks than samples in a step."""
        return True

    @abstractmethod
    def headline(self) -> str:
        """What it is, in one line."""

    @abstractmethod
    def layout_name(self, price: PricedLayout) -> str:
        """What tells a row of the plan from others, in few columns."""

    def limits(self, spec: RunSpec) -> LayoutConstraints:
        return constraints_of(spec)

    @abstractmethod
    def layout(self, spec: RunSpec) -> Layout:
        """The layout that a run file asks for."""

    @abstractmethod
    def families(
        self, devices: int, cluster: Cluster, limits: LayoutConstraints
    ) -> Iterator[LayoutFamily | RejectedFamily]:
        """The families of layouts on that many devices, possible and not."""

    @abstractmethod
    def members(self, family: LayoutFamily, limits: LayoutConstraints, offload: bool) -> Iterator[list[Layout]]:
        """Layouts of a family in lists, each from the one that needs the most memory to the one that needs least."""

    def schedules(self, layout: Layout, limits: LayoutConstraints) -> Iterator[Layout]:
        """Variants of a layout that take as much memory."""
        yield layout

    @abstractmethod
    def memory(self, layout: Layout, where: PricedCluster) -> DeviceMemory:
        """Of the fullest device."""

    @abstractmethod
    def price(self, layout: Layout, where: PricedCluster) -> PricedLayout: ...

    def pauses_s(self, price: PricedLayout) -> dict[str, float]:
        """Seconds of the whole run between its steps, by what is done in them."""
        return {}

    def describe_pauses(self, price: PricedLayout) -> str:
        """The same, for people."""
        return ""

    @abstractmethod
    def overrides(self, layout: Layout) -> dict[str, Any]:
        """The dotted values of the run file that lead to a layout."""

    @abstractmethod
    def advice(self, plan: Plan) -> Iterator[str]:
        """What to do, where something fits."""

    def engine_obstacle(self, engine: str) -> str:
        """Why an engine that is not torch cannot do this kind of work; empty where it can."""
        return ""

    def details(self) -> dict[str, Any]:
        """What only some kinds of work have, for JSON."""
        return {"counts": None}

    def as_json(self) -> dict[str, Any]:
        names = ("flops_per_sample", "global_batch", "units_per_sample", "unit", "samples", "steps")
        return {
            "name": self.name,
            "workload": self.workload,
            "parameters": self.params,
            **{name: getattr(self, name) for name in names},
            "numbers": asdict(self.numbers),
            **self.details(),
            "assumptions": list(self.assumptions),
        }


def build_cost_model(spec: RunSpec, samples: int | None = None, tokens: float | None = None) -> CostModel:
    """The subject of a run file; `samples` and `tokens` (mean, per sample) replace what is read or assumed."""
    for name, value in (("samples", samples), ("tokens", tokens)):
        if value is not None and not 0 < value <= MOST:
            shown = f"{value:g}" if value < MOST else "so many"
            raise UserError(f"--{name}: {shown} is not possible; give more than 0 and at most {MOST:,}")
    if spec.entry is RECORDED_ENTRY:
        raise UserError(f"workload: {spec.workload} is of a run that is only looked at; its code is not executed")
    found: CostModel = import_object(spec.entry.subject or TRACED_COST_MODEL)(spec, samples, tokens)
    return found


def split_rows(rows: int, ranks: int) -> Layout:
    """A rank has the next part of the rows, and passes over it whole."""
    return Layout("ddp" if ranks > 1 else "single", ranks, rows, -(-rows // ranks))


def rows_per_rank(layout: Layout) -> int:
    """Of the fullest rank."""
    return -(-layout.global_batch // layout.data)


@dataclass(frozen=True, kw_only=True)
class PassCostModel(CostModel):
    """A fit whose step is a pass over all rows; `global_batch` is their number."""

    wording: ClassVar[PlanWording] = PlanWording(step="pass", total="fit", durations=True, several_layouts=False)
    model: ClassVar[str]
    """What is fitted, with its article."""

    def limits(self, spec: RunSpec) -> LayoutConstraints:
        return LayoutConstraints()

    def layout(self, spec: RunSpec) -> Layout:
        return split_rows(self.global_batch, spec.parallel.ranks)

    def families(
        self, devices: int, cluster: Cluster, limits: LayoutConstraints
    ) -> Iterator[LayoutFamily | RejectedFamily]:
        if devices > self.global_batch:
            facts = {"batch": self.global_batch}
            yield RejectedFamily(devices, f"{devices} data-parallel ranks", RejectReason.NO_SAMPLE, facts)
        else:
            yield LayoutFamily(split_rows(self.global_batch, devices))

    def members(self, family: LayoutFamily, limits: LayoutConstraints, offload: bool) -> Iterator[list[Layout]]:
        if not offload:
            yield [family.base]

    def overrides(self, layout: Layout) -> dict[str, Any]:
        return {"parallel.ranks": layout.ranks}

    def engine_obstacle(self, engine: str) -> str:
        return f"{self.model} has no gradients for {engine} to send"
