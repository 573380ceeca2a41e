"""What a search goes through: families of layouts, the limits that a run file sets, and why a family cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paceline.layout import Layout
from paceline.record.units import size
from paceline.spec import DEFAULT, RunSpec


@dataclass(frozen=True)
class Limits:
    """What the run file insists on; None leaves it to the search."""

    strategy: str | None = None
    tensor: int | None = None
    pipeline: int | None = None
    schedule: str | None = None
    sequence: bool | None = None
    micro_batch: int | None = None
    checkpointing: str | None = None
    offload: bool | None = None

    def words(self) -> str:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return " ".join(f"parallel.{name}={str(value).lower()}" for name, value in given.items())


def limits_of(spec: RunSpec) -> Limits:
    """The fields of `parallel` that were written down; `auto` leaves all of them to the search."""
    parallel = spec.parallel
    usual = type(parallel)()
    given = {}
    for name in vars(Limits()):
        value = getattr(parallel, name)
        written = spec.origin(f"parallel.{name}") != DEFAULT or value != getattr(usual, name)
        if written and value not in (None, "auto"):
            given[name] = value
    if given.get("strategy") == "zero3":
        given["strategy"] = "fsdp"
    if parallel.reduce != "exact":  # for plain data parallelism alone
        given = {"strategy": "ddp", "tensor": 1, "pipeline": 1, **given}
    return Limits(**given)


@dataclass(frozen=True)
class Family:
    """Layouts that differ in batch, recomputation and offload alone."""

    base: Layout
    offloaded_only: bool = False
    """It makes sense only with states in host memory."""

    @property
    def name(self) -> str:
        return family_name(self.base)


def family_name(layout: Layout) -> str:
    return " + ".join(_parts(layout))


def _parts(layout: Layout) -> list[str]:
    strategy = layout.strategy
    if strategy == "hsdp":
        strategy += f" {layout.replicate}×{layout.shard}"
    axes = [f"{axis} {size}" for axis in ("tensor", "pipeline") if (size := getattr(layout, axis)) > 1]
    return axes if strategy == "single" and axes else [strategy, *axes]


class Refusal(Enum):
    """Why a family of layouts cannot be; the value is the reason, with the facts of a `Refused` to be filled in."""

    NO_RULES = "{workload} has no rules to divide its layers"
    FP8 = "fp8 scales whole matrices"
    CROSSES_NODES = "tensor {tensor} crosses nodes of {per_node}"
    INDIVISIBLE = "{tensor} does not divide {size} heads or features"
    NO_LAYERS = "{workload} has no layers to divide among stages"
    FEW_LAYERS = "{layers} layers are fewer than {stages} stages"
    NO_SAMPLE = "batch {batch} leaves some without a sample"
    UNFILLED = "{samples} samples per rank do not fill {stages} stages"
    MEMORY = "{term} {over} over"
    MEMORY_OFFLOADED = "{term} {over} over even offloaded"
    HOST_MEMORY = "offloaded states take {needed_bytes} of host memory per node, which has {capacity_bytes}"
    NO_SUCH_CLUSTER = "{error}"


@dataclass(frozen=True)
class Refused:
    """A family of layouts that cannot be, and why."""

    devices: int
    family: str
    kind: Refusal
    facts: Mapping[str, Any] = field(default_factory=dict)
    over_bytes: float = 0.0
    parts: int = 1
    """How many words the family's name joins: the fewer, the plainer it is."""
    axes: tuple[str, ...] = ()
    """Those of `tensor` and `pipeline` that it names."""

    @property
    def reason(self) -> str:
        facts = {name: size(fact) if name.endswith("_bytes") else fact for name, fact in self.facts.items()}
        over = self.over_bytes / 1e9
        return self.kind.value.format(**facts, over=f"{over:.0f} GB" if over >= 9.5 else f"{over:.1f} GB")

    @property
    def group(self) -> tuple[object, ...]:
        """What it has in common with refusals of the same kind, of which one is told."""
        memory = self.kind in (Refusal.MEMORY, Refusal.MEMORY_OFFLOADED)
        return (Refusal.MEMORY, self.facts["term"]) if memory else (self.kind,)

    def as_json(self) -> dict[str, Any]:
        return {"devices": self.devices, "family": self.family, "reason": self.reason, "over_bytes": self.over_bytes}


def refused(family: Family, kind: Refusal, over_bytes: float, **facts: Any) -> Refused:
    """A family none of whose layouts fits."""
    layout = family.base
    axes = tuple(axis for axis in ("tensor", "pipeline") if getattr(layout, axis) > 1)
    return Refused(layout.ranks, family.name, kind, facts, over_bytes, len(_parts(layout)), axes)
