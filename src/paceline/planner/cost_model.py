"""The interface between a plan and a workload: what a run of any kind costs, under a layout and on a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.config import RunSpec
from paceline.config.registry import RECORDED_ENTRY, import_object
from paceline.config.sections import MAX_INT
from paceline.hardware.catalogue import Cluster
from paceline.io.arguments import option_error
from paceline.layout import Layout
from paceline.planner.candidates import LayoutConstraints, PricedLayout, RejectedFamily, RejectReason
from paceline.planner.formulas.memory import TERMS, DeviceMemory
from paceline.planner.formulas.placement import DtypeSizes
from paceline.planner.formulas.simulation import Timeline
from paceline.planner.target import PricedCluster

if TYPE_CHECKING:
    from paceline.planner.plan import Plan

TRACED_COST_MODEL = "paceline.planner.tracing:build_traced_cost_model"
"""Builder for workloads that name none: their model is traced."""
TIME_TERMS = TERMS["time"]


@dataclass(frozen=True)
class PlanWording:
    """The words of a plan's tables that depend on the kind of work."""

    layout: str = "layout"
    step: str = "step"
    total: str = "hours"
    durations: bool = False  # that column shows units, as runs may be short
    batch: str = "this batch"
    times: Mapping[str, str] = field(default_factory=lambda: TIME_TERMS)
    several_layouts: bool = True  # there are layouts to choose from on a number of devices
    to_fit: str = "Take {devices} or a smaller model{search}."


@dataclass(frozen=True, kw_only=True)
class CostModel(ABC):
    """What prices depend on besides layout and cluster. A family: alike but for micro-batch, recomputation, offload."""

    name: str
    workload: str
    global_batch: int
    numbers: DtypeSizes
    steps: int | None  # of the whole run; None if the number of samples is not known
    samples: int | None = None
    unit: str = "samples"
    units_per_sample: float = 1.0
    assumptions: tuple[str, ...] = ()
    constraints: LayoutConstraints = field(default_factory=LayoutConstraints)

    wording: ClassVar[PlanWording] = PlanWording()

    @property
    @abstractmethod
    def params(self) -> float: ...

    @property
    def trained_params(self) -> float:
        """Parameters that are updated; the others are frozen."""
        return self.params

    @property
    def stored_params(self) -> float:
        """Parameters by the bytes they take: frozen ones in 16 bits count half."""
        return self.params

    @property
    @abstractmethod
    def flops_per_sample(self) -> float: ...

    @property
    def divides_samples_only(self) -> bool:
        """Return whether every rank needs a sample, so that there cannot be more ranks than samples in a step."""
        return True

    @abstractmethod
    def headline(self) -> str: ...

    @abstractmethod
    def layout_name(self, price: PricedLayout) -> str:
        """Name what tells a row of the plan from others, in few columns."""

    @abstractmethod
    def layout(self, spec: RunSpec) -> Layout: ...

    @abstractmethod
    def families(self, devices: int, cluster: Cluster) -> Iterator[Layout | RejectedFamily]:
        """Yield one layout of each family on that many devices, and the families that are impossible."""

    @abstractmethod
    def members(self, family: Layout, offload: bool) -> Iterator[list[Layout]]:
        """Yield the layouts of a family in lists, each from the one that needs the most memory to the least."""

    def schedules(self, layout: Layout) -> Iterator[Layout]:
        """Yield variants of a layout that need as much memory."""
        yield layout

    @abstractmethod
    def memory(self, layout: Layout, where: PricedCluster) -> DeviceMemory: ...

    @abstractmethod
    def price(self, layout: Layout, where: PricedCluster) -> PricedLayout: ...

    def timeline(self, price: PricedLayout) -> Timeline | None:
        """Simulate one step of a layout event by event; None for work that has no such steps."""
        return None

    def pauses_s(self, price: PricedLayout) -> dict[str, float]:
        """Return the seconds of the whole run between its steps, by what is done in them."""
        return {}

    def describe_pauses(self, price: PricedLayout) -> str:
        return ""

    def save_s(self, price: PricedLayout) -> float | None:
        """Return how long the run pauses for a checkpoint; None if that is not known."""
        return None

    def checkpoint_steps(self) -> int | None:
        """Return the steps between checkpoints; None if the run file leaves them open."""
        return None

    @abstractmethod
    def overrides(self, layout: Layout) -> dict[str, Any]:
        """Return the dotted values of the run file that lead to a layout."""

    @abstractmethod
    def advice(self, plan: "Plan") -> Iterator[str]: ...

    def engine_obstacle(self, engine: str) -> str:
        """Return why an engine other than torch cannot do this kind of work, or ""."""
        return ""

    def details(self) -> dict[str, Any]:
        """Return what only some kinds of work have, for JSON."""
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
    """Build the cost model of a run file; `samples`, and mean `tokens` of each, replace what is read."""
    for option, value in (("--samples", samples), ("--tokens", tokens)):
        if value is not None and not 0 < value <= MAX_INT:
            shown = f"{value:g}" if value < MAX_INT else "so many"
            raise option_error(option, f"{shown} is not possible; give more than 0 and at most {MAX_INT:,}")
    if spec.entry is RECORDED_ENTRY:
        problem = f"{spec.workload} is of a run that is only looked at; its code is not executed"
        raise option_error("workload", problem, "not-trusted")
    found: CostModel = import_object(spec.entry.subject or TRACED_COST_MODEL)(spec, samples, tokens)
    return found


def split_rows(rows: int, ranks: int) -> Layout:
    """Return the layout that gives each rank the next part of the rows, which it passes over whole."""
    return Layout("ddp" if ranks > 1 else "single", ranks, rows, -(-rows // ranks))


def rows_per_rank(layout: Layout) -> int:
    return -(-layout.global_batch // layout.data)


@dataclass(frozen=True, kw_only=True)
class PassCostModel(CostModel):
    """A fit whose step is a pass over all rows; `global_batch` is their number."""

    wording: ClassVar[PlanWording] = PlanWording(step="pass", total="fit", durations=True, several_layouts=False)
    model: ClassVar[str]  # what is fitted, with its article

    def layout(self, spec: RunSpec) -> Layout:
        return split_rows(self.global_batch, spec.parallel.ranks)

    def families(self, devices: int, cluster: Cluster) -> Iterator[Layout | RejectedFamily]:
        """Yield the one family of a fit, rows divided among ranks, or its rejection if devices outnumber the rows."""
        if devices > self.global_batch:
            name, facts = f"{devices} data-parallel ranks", {"batch": self.global_batch, "ranks": devices}
            yield RejectedFamily(devices, name, RejectReason.NO_SAMPLE, facts)
        else:
            yield split_rows(self.global_batch, devices)

    def members(self, family: Layout, offload: bool) -> Iterator[list[Layout]]:
        if not offload:
            yield [family]

    def overrides(self, layout: Layout) -> dict[str, Any]:
        return {"parallel.ranks": layout.ranks}

    def engine_obstacle(self, engine: str) -> str:
        return f"{self.model} has no gradients for {engine} to send"
