"""Candidates of a search: the layouts that a training can have, their price, and families that are rejected."""

import csv
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from paceline.config import DEFAULT, RunSpec
from paceline.config.sections import RingRanks
from paceline.hardware.catalogue import Cluster
from paceline.io.format import size
from paceline.layout import ZERO_STAGES, Layout
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.step_time import StepTime
from paceline.planner.target import PricedCluster

PROCESS_BYTES = 2e9  # host memory of each rank beside what is offloaded: libraries, driver, prefetched batches
SEARCHED_STRATEGIES = tuple(strategy for strategy in ZERO_STAGES if strategy != "zero3")
UNSHARDED_STRATEGIES = tuple(strategy for strategy in SEARCHED_STRATEGIES if ZERO_STAGES[strategy] < 2)
"""Those under which every rank holds all weights and gradients."""
MAX_TENSOR = 16
MAX_STAGES = 64
MAX_CONTEXT, LONG_SEQUENCE = 64, 16_384
"""Sequences of so many tokens are divided without being asked to."""

BANDS_FILE = Path(__file__).with_name("bands.csv")
"""Bands of predicted memory and time, by how work is spread, measured by `benchmarks/plan_bands.py`."""
ALL, UNKNOWN = "all", "unknown"
Quantity = Literal["memory", "time"]


@dataclass(frozen=True)
class Band:
    """Factors of a predicted value between which measurements lie."""

    quantity: str
    situation: str
    low: float
    high: float
    rows: int  # published measurements behind it
    families: int  # groups of people who made them
    coverage: float  # of those rows, inside the band that the other families give; NaN without rows


def name_situation(pipeline: int, tensor: int, zero: int, ranks: int) -> str:
    """Return how work is spread, as far as errors of the plan depend on it."""
    if pipeline > 1:
        return "pipeline"
    if tensor > 1:
        return "tensor"
    return "sharded" if zero >= 2 else "replicated" if ranks > 1 else "single"


@functools.cache
def load_bands() -> dict[tuple[str, str], Band]:
    """Return the bands by quantity and situation."""
    with BANDS_FILE.open(encoding="utf-8", newline="") as file:
        bands = TypeAdapter(list[Band]).validate_python(list(csv.DictReader(file)))
    return {(band.quantity, band.situation): band for band in bands}


@dataclass(frozen=True)
class PricedLayout:
    """A layout on as many devices as it has ranks, with the time and memory of a step."""

    layout: Layout
    where: PricedCluster
    time: StepTime
    memory: DeviceMemory
    start_s: float = 0.0  # before the first step, where that is priced
    situation: str = UNKNOWN  # by which published measurements are chosen that tell how far prices are off

    @property
    def devices(self) -> int:
        return self.where.cluster.devices

    @property
    def step_s(self) -> float:
        return self.time.step_s

    @property
    def passes(self) -> int:
        return self.layout.passes(self.layout.global_batch)

    @property
    def samples_s(self) -> float:
        return self.layout.global_batch / self.step_s

    @property
    def capacity_bytes(self) -> float:
        return self.where.cluster.device.memory_bytes

    @property
    def over_bytes(self) -> float:
        """Bytes by which it exceeds the memory of the device; negative where there is room."""
        return self.memory.held_bytes(self.where.cluster.device) - self.capacity_bytes

    @property
    def host_node_bytes(self) -> float:
        """Host memory that the ranks of one node need if states are offloaded, else 0."""
        if not self.layout.offload:
            return 0.0
        return self.where.cluster.per_node * (self.memory.host_bytes + PROCESS_BYTES)

    @property
    def host_over_bytes(self) -> float:
        """Bytes by which it exceeds the host memory of a node; negative where there is room, or none is known."""
        capacity = self.where.cluster.host_bytes
        return self.host_node_bytes - capacity if capacity is not None else -math.inf

    @property
    def fits(self) -> bool:
        return self.over_bytes <= 0 and self.host_over_bytes <= 0

    @property
    def tight(self) -> bool:
        """Return whether it may not fit: the estimate does, and the upper end of its band does not."""
        return self.fits and self.memory_band_bytes[1] > self.capacity_bytes

    def find_band(self, quantity: Quantity) -> Band:
        """Return the band of this layout's memory or time."""
        bands = load_bands()
        return bands.get((quantity, self.situation)) or bands[quantity, ALL]

    @property
    def memory_band_bytes(self) -> tuple[float, float]:
        band, total = self.find_band("memory"), self.memory.total_bytes
        return band.low * total, band.high * total

    @property
    def compute_over_comm(self) -> float:
        return self.time.compute_s / self.time.comm_s if self.time.comm_s else float("inf")

    @property
    def waits_for_data(self) -> bool:
        return self.time.data_s > 0.05 * self.step_s

    def as_json(self) -> dict[str, Any]:
        totals = {"total_bytes": self.memory.total_bytes, "capacity_bytes": self.capacity_bytes}
        return {
            "layout": {**asdict(self.layout), "ranks": self.layout.ranks, "passes": self.passes},
            "time": {**asdict(self.time), "step_s": self.step_s},
            "memory": {**asdict(self.memory), **totals},
            "memory_band_bytes": self.memory_band_bytes,
            "host": {"node_bytes": self.host_node_bytes, "capacity_bytes": self.where.cluster.host_bytes},
            "start_s": self.start_s,
            "samples_s": self.samples_s,
            "compute_over_comm": self.compute_over_comm,
            "fits": self.fits,
            "tight": self.tight,
        }


class RejectReason(Enum):
    """Why a family of layouts is rejected; the value is the sentence, to be filled with facts."""

    NO_RULES = "no plan prices layers of {workload} that ranks divide"
    FP8 = "fp8 scales whole matrices"
    CROSSES_NODES = "tensor {tensor} crosses nodes of {per_node}"
    INDIVISIBLE = "{tensor} does not divide {size} heads or features"
    NO_LAYERS = "no plan prices stages of {workload}"
    FEW_LAYERS = "{layers} layers are fewer than {pipeline} stages"
    NO_CONTEXT = "{workload} does not divide sequences"
    ODD_CONTEXT = "{context} ranks need two equal parts each of {sequence} tokens"
    NO_SAMPLE = "batch {batch} leaves some without a sample; take {batch} or train.global_batch={ranks}"
    UNFILLED = "{samples} per rank cannot fill {pipeline} stages"
    MEMORY = "{term} {over} over"
    MEMORY_OFFLOADED = "{term} {over} over even offloaded"
    HOST_MEMORY = "offloaded states need {needed_bytes} of host memory per node, which has {capacity_bytes}"
    NO_SUCH_CLUSTER = "{error}"


@dataclass(frozen=True)
class RejectedFamily:
    """A family of layouts that is not possible or does not fit, and why."""

    devices: int
    family: str
    code: RejectReason
    facts: Mapping[str, Any] = field(default_factory=dict)
    over_bytes: float = 0.0
    axes: tuple[str, ...] = ()
    nearest: PricedLayout | None = None  # its layout that needs the least memory, if memory is the reason

    @classmethod
    def of(cls, nearest: PricedLayout, code: RejectReason, over_bytes: float, **facts: Any) -> "RejectedFamily":
        """Reject a family none of whose layouts fits; `nearest` exceeds the memory by `over_bytes`."""
        layout = nearest.layout
        return cls(layout.ranks, layout.family, code, facts, over_bytes, layout.split_axes, nearest)

    @property
    def parts(self) -> int:
        """Return how many words the family's name joins: the fewer, the simpler."""
        return self.family.count(" + ") + 1

    @property
    def reason(self) -> str:
        facts = {name: size(fact) if name.endswith("_bytes") else fact for name, fact in self.facts.items()}
        over = self.over_bytes / 1e9
        return self.code.value.format(**facts, over=f"{over:.0f} GB" if over >= 9.5 else f"{over:.1f} GB")

    @property
    def group(self) -> tuple[object, ...]:
        """Return the key of rejections that are alike, of which one is shown."""
        memory = self.code in (RejectReason.MEMORY, RejectReason.MEMORY_OFFLOADED)
        return (RejectReason.MEMORY, self.facts["term"]) if memory else (self.code,)

    def as_json(self) -> dict[str, Any]:
        return {"devices": self.devices, "family": self.family, "reason": self.reason, "over_bytes": self.over_bytes}


@dataclass(frozen=True)
class LayoutConstraints:
    """Values of `parallel` that the run file fixes; None leaves a value to the search."""

    strategy: str | None = None
    tensor: int | None = None
    context: int | None = None
    ring: bool | None = None  # with `context` written as 4:ring
    expert: int | None = None
    pipeline: int | None = None
    schedule: str | None = None
    sequence: bool | None = None
    micro_batch: int | None = None
    activation_checkpointing: str | None = None
    offload: bool | None = None
    written: tuple[tuple[str, Any], ...] = field(default=(), compare=False)  # the same as the run file has them

    def describe(self) -> str:
        return format_words({f"parallel.{name}": value for name, value in self.written})


def format_words(values: Mapping[str, Any]) -> str:
    """Format dotted values as they are typed."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in values.items())


def constraints_of(spec: RunSpec) -> LayoutConstraints:
    """Return the fields of `parallel` that were written down; `auto` leaves all of them to the search."""
    parallel = spec.parallel
    defaults = type(parallel)()
    given = {}
    for name in (one.name for one in fields(LayoutConstraints) if one.name not in ("ring", "written")):
        value = getattr(parallel, name)
        written = spec.origin(f"parallel.{name}") != DEFAULT or value != getattr(defaults, name)
        if written and value not in (None, "auto"):
            given[name] = value
    as_written = tuple(given.items())
    if isinstance(given.get("context"), RingRanks):
        given |= {"context": int(given["context"]), "ring": True}
    if given.get("strategy") == "zero3":
        given["strategy"] = "fsdp"
    if parallel.reduce != "exact":  # for data parallelism alone
        given = {"strategy": "ddp", "tensor": 1, "context": 1, "expert": 1, "pipeline": 1, **given}
        as_written = (*as_written, ("reduce", parallel.reduce))
    return LayoutConstraints(**given, written=as_written)


@dataclass(frozen=True)
class SplitOptions:
    """What of a model can be divided among ranks besides its samples."""

    splits: tuple[int, ...] = ()
    """Sizes that the ranks of `tensor` must divide; empty if the model cannot be divided."""
    sequence: int = 0  # positions that the ranks of `tensor` may divide among them; 0 if they cannot
    experts: int = 0  # that the ranks of `expert` may divide
    context: int = 0  # positions that the ranks of `context` may divide; 0 if they cannot
    layers: int = 0  # layers that a pipeline can divide; 0 if it cannot
    inferred: bool = False  # rules and stages are found as it runs: they are eager, and tried if the run file asks
    recomputes: bool = True  # has repeated layers, which activation checkpointing recomputes
    weights: bool = True  # a rank may hold a part of each weight


@dataclass(frozen=True)
class LayoutSpace:
    workload: str
    batch: int
    splits: SplitOptions
    fp8: bool
    devices: int
    cluster: Cluster
    constraints: LayoutConstraints

    def families(self) -> Iterator[Layout | RejectedFamily]:
        """Yield one layout of each family; an offloaded one if the family only makes sense offloaded."""
        tensors = min(self.devices, MAX_TENSOR) if self.splits.splits and not self.fp8 else 1
        stages = min(self.devices, max(1, self.splits.layers), MAX_STAGES)
        if self.splits.inferred:
            tensors = stages = 1
        contexts = min(self.devices, MAX_CONTEXT) if self.splits.context >= LONG_SEQUENCE else 1
        fixed = self.constraints
        tried = [
            [1 << k for k in range(most.bit_length())] if size is None else [size]
            for most, size in ((stages, fixed.pipeline), (tensors, fixed.tensor), (contexts, fixed.context))
        ]
        for pipeline, tensor, context in itertools.product(*tried):
            yield from self._split(tensor, pipeline, context)

    def _split(self, tensor: int, pipeline: int, context: int) -> Iterator[Layout | RejectedFamily]:
        """Yield the families in which that many ranks divide the model and its sequences."""
        data, left = divmod(self.devices, tensor * pipeline * context)
        data = 0 if left else data
        if code := self._find_obstacle(tensor, pipeline, context, data):
            yield self._reject(code, tensor, pipeline, context, data)
        if code or not data:
            return
        schedule = self.constraints.schedule or "1f1b"
        sequence = self.constraints.sequence
        if sequence is None:
            sequence = tensor > 1 and self.splits.sequence > 0 and self.splits.sequence // context % tensor == 0
        free = not self.constraints.offload and self.constraints.strategy is None
        for replicate, shard, strategy in self._strategies(data, tensor, pipeline, context):
            offload_only = self.cluster.devices == 1 and strategy == "fsdp" and free
            shape = (replicate, self.batch, 1, shard, tensor, pipeline, schedule, sequence)
            family = Layout(strategy, *shape, offload=offload_only, context=context)
            for ring in self._list_exchanges(context):
                divided = (replace(family, ring=ring, expert=expert) for expert in self._divide_experts(family))
                yield from divided

    def _reject(self, code: RejectReason, tensor: int, pipeline: int, context: int, data: int) -> RejectedFamily:
        axes: dict[str, Any] = {"tensor": tensor, "context": context, "pipeline": pipeline}
        sides = {axis: size for axis, size in axes.items() if size > 1} or {"tensor": tensor}
        name = " + ".join(f"{axis} {size}" for axis, size in sides.items())
        if code is RejectReason.NO_SAMPLE:
            who = f"{data} data-parallel ranks"
            name, sides = (who, {}) if data == self.devices else (f"{name}: {who}", sides)
        share = self.batch // max(1, data)
        facts = axes | {"workload": self.workload, "batch": self.batch, "ranks": data, "sequence": self.splits.context}
        facts |= {"per_node": self.cluster.per_node, "layers": self.splits.layers}
        facts |= {"size": next((size for size in self.splits.splits if size % tensor), 0)}
        facts |= {"samples": f"{share} sample{'s' * (share > 1)}"}
        return RejectedFamily(self.devices, name, code, facts, axes=tuple(sides))

    def _find_obstacle(self, tensor: int, pipeline: int, context: int, data: int) -> RejectReason | None:
        """Return why no layout has these sizes, of `data` ranks with their own samples (0: they do not divide)."""
        splits, layers, sequence = self.splits.splits, self.splits.layers, self.splits.context
        obstacles = {
            RejectReason.NO_RULES: tensor > 1 and not splits,
            RejectReason.FP8: tensor > 1 and self.fp8,
            RejectReason.CROSSES_NODES: tensor > self.cluster.per_node,
            RejectReason.INDIVISIBLE: any(size % tensor for size in splits),
            RejectReason.NO_CONTEXT: context > 1 and not sequence,
            RejectReason.ODD_CONTEXT: context > 1 and sequence % (2 * context),
            RejectReason.NO_LAYERS: pipeline > 1 and not layers,
            RejectReason.FEW_LAYERS: pipeline > max(1, layers),
            RejectReason.NO_SAMPLE: data > self.batch,
            RejectReason.UNFILLED: data and pipeline > 1 and self.batch // data < pipeline,
        }
        return next((reason for reason, holds in obstacles.items() if holds), None)

    def _list_exchanges(self, context: int) -> list[bool]:
        """List whether keys and values are passed round a ring; under selective recomputation they are not."""
        fixed = self.constraints
        if context == 1 or fixed.activation_checkpointing == "selective":
            return [False]
        return [False, True] if fixed.ring is None else [fixed.ring]

    def _divide_experts(self, family: Layout) -> Iterator[int]:
        """Yield numbers of ranks that may divide the experts: none, and as many as fit into a node."""
        replicate, shard = family.summed_over
        ranks = 1 if family.strategy == "zero1" or family.offload else shard if shard > 1 else replicate
        if (fixed := self.constraints.expert) is not None:
            yield from [] if self.splits.experts % fixed or ranks % fixed else [fixed]
            return
        yield 1
        most = math.gcd(self.splits.experts, ranks, self.cluster.per_node)
        yield from [most] if self.splits.experts and most > 1 else []

    def _strategies(self, data: int, tensor: int, pipeline: int, context: int) -> Iterator[tuple[int, int, str]]:
        """Yield (replicate, shard, strategy) of the data-parallel ranks."""
        fixed = self.constraints.strategy
        free = SEARCHED_STRATEGIES if self.splits.weights else UNSHARDED_STRATEGIES
        for strategy in free if fixed is None else (fixed,):
            if strategy == "single":
                if self.devices == 1 or (fixed is not None and data * context == 1):
                    yield 1, 1, strategy
            elif strategy == "hsdp":
                in_node = max(1, self.cluster.per_node // (tensor * context))
                shards = [s for s in (in_node << k for k in range(8)) if s > 1 and data % s == 0 and data // s > 1]
                yield from ((data // s, s, strategy) for s in shards[:3])
            elif strategy == "ddp":
                if self.devices > 1 or fixed is not None:
                    yield data, 1, strategy if data * context > 1 else "single"
            elif strategy == "zero1" and tensor * pipeline > 1:
                continue
            elif data * context > 1 or (self.devices == 1 and (strategy == "fsdp" or fixed is not None)):
                yield 1, data, strategy  # on one device only to move its states to the host
