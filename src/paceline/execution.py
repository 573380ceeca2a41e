"""How a step runs on its device: decided once, and without torch, so that the planner prices what the runtime applies.

A `Layout` says how work is spread over ranks; an `Execution` what each of them does with its part: operation by
operation (eager), through compiled layers, through the model compiled whole, or as one recorded CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from paceline.layout import Layout
from paceline.registry import Traits
from paceline.spec import Train

HALF_PRECISIONS = ("bf16", "fp16", "fp8")
"""Types of the matrix products for which compiled kernels are made."""
RECORDED_OPTIMIZERS = ("adamw", "sgd")
"""Those whose update never asks the host."""


@dataclass(frozen=True)
class Target:
    """What runs the step: its kind, and whether kernels can be compiled for it."""

    kind: Literal["cpu", "cuda"]
    compiles: bool = False
    """A CUDA device with Triton, and a C compiler, which Triton calls."""


CPU = Target("cpu")
CUDA = Target("cuda", compiles=True)


class Reason(Enum):
    """Why a step is not recorded as a graph."""

    RECORDED = "it is"
    COMPILE_OFF = "train.compile=off"
    ON_CPU = "there is no CUDA device"
    NO_COMPILER = "Triton or a C compiler is missing"
    SEVERAL_RANKS = "collectives between ranks stay outside of graphs"
    LAYERS_RECOMPUTED = "layers are computed again in the backward pass"
    ACCUMULATED = "a step has several micro-batches"
    FULL_PRECISION = "compiled kernels are for train.precision=bf16, fp16 or fp8"
    OPTIMIZER = "the optimiser asks the host during its update"
    MANY_SHAPES = "samples come in many shapes"
    OTHER_ENGINE = "another engine runs the step"


@dataclass(frozen=True)
class Execution:
    """What a rank does with its part of a step."""

    compiled_layers: bool = False
    compiled_whole: bool = False
    recorded: bool = False
    """One CUDA graph holds the whole step, update included."""
    reason: Reason = Reason.ON_CPU
    """Why it is not recorded, the first that applies."""

    @property
    def compiled(self) -> bool:
        return self.compiled_layers or self.compiled_whole

    def words(self) -> str:
        """What is done, and why not more."""
        kernels = "compiled whole" if self.compiled_whole else "compiled by layer" if self.compiled_layers else "eager"
        if self.recorded:
            return f"{kernels} and recorded as one CUDA graph"
        return f"{kernels}, not recorded: {self.reason.value}" if self.compiled else f"eager: {self.reason.value}"


def execution_of(train: Train, layout: Layout, target: Target, traits: Traits) -> Execution:
    """The one decision: what is compiled, and whether the step is recorded."""
    half = train.precision in HALF_PRECISIONS
    layers = train.compile == "on" or (train.compile == "auto" and traits.equal_layers and half and target.compiles)
    reason = _why_not_recorded(train, layout, target, traits)
    recorded = reason is Reason.RECORDED
    return Execution(layers, recorded and not traits.equal_layers, recorded, reason)


def _why_not_recorded(train: Train, layout: Layout, target: Target, traits: Traits) -> Reason:
    checks = (
        (train.compile != "off", Reason.COMPILE_OFF),
        (target.kind == "cuda", Reason.ON_CPU),
        (target.compiles, Reason.NO_COMPILER),
        (train.precision in HALF_PRECISIONS, Reason.FULL_PRECISION),
        (layout.ranks == 1 and layout.plain, Reason.SEVERAL_RANKS),
        (layout.checkpointing == "none", Reason.LAYERS_RECOMPUTED),
        (layout.passes(layout.global_batch) == 1, Reason.ACCUMULATED),
        (train.optimizer in RECORDED_OPTIMIZERS and not traits.own_optimizer, Reason.OPTIMIZER),
        (traits.few_shapes, Reason.MANY_SHAPES),
    )
    return next((reason for holds, reason in checks if not holds), Reason.RECORDED)
