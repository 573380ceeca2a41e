"""How a step runs on its device: decided once, without torch, so that what is priced is what runs.

A `Layout` says how work is spread over ranks; an `Execution` what each of them does with its part: operation by
operation (eager), through compiled layers, through the model compiled whole, and any of them recorded as one CUDA
graph. Recording takes a tenth of a second and always pays; compiling takes many seconds, and pays where the run is
long enough (`CompileEstimate`). Convolutions that are not compiled may read images with their channels innermost, and
the loss over a vocabulary may be computed in chunks.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from paceline.config import Train
from paceline.config.registry import StepWork, Traits
from paceline.layout import Layout

HALF_PRECISIONS = ("bf16", "fp16", "fp8")  # precisions for which compiling pays
RECORDED_OPTIMIZERS = ("adamw", "adam", "sgd")  # optimisers whose update never synchronises with the host

START_COMPILER_S = 8.0
COMPILE_OPERATION_S = 0.2
"""For an operation of the forward pass and its gradient; 0.1 for many small ones, 0.3 for convolutions."""
SAVED_PER_ELEMENT_S = 5.5e-12
"""In a whole step, for each element that the forward pass moves between its matrix products.

On an H200 a CNN with group norms saved 6.3e-12, a text classifier 5.1e-12."""


@dataclass(frozen=True)
class Target:
    """What runs the step."""

    kind: Literal["cpu", "cuda"]
    compiles: bool = False  # there are Triton and a C compiler, which Triton calls


CPU = Target("cpu")
CUDA = Target("cuda", compiles=True)


class NoGraphReason(Enum):
    """Why a step is not recorded as a graph."""

    RECORDED = "it is"
    COMPILE_OFF = "train.compile=off"
    ON_CPU = "there is no CUDA device"
    SEVERAL_RANKS = "collectives between ranks stay outside of graphs"
    LAYERS_RECOMPUTED = "layers are computed again in the backward pass"
    ACCUMULATED = "a step has several micro-batches"
    FULL_PRECISION = "its kernels for a few shapes are for train.precision=bf16, fp16 or fp8"
    OPTIMIZER = "the optimiser asks the host during its update"
    MANY_SHAPES = "samples come in many shapes"
    OTHER_ENGINE = "another engine runs the step"
    OWN_LOOP = "a script computes its loss itself"
    ASKS_DEVICE = "the model waits for the device during a step, as .item() and boolean masks do"
    DRAWS_ON_HOST = "the model draws random numbers on the host, which a graph would repeat"
    COUNTS_STEPS = "the model changes in Python during a step, which a graph would not"
    NOT_ON_HOST = "batches are not plain tensors in host memory"
    NOT_CAPTURED = "CUDA could not record it"


@dataclass(frozen=True)
class CompileEstimate:
    """What compiling costs and saves a run."""

    cost_s: float
    saved_s_per_step: float
    steps: int | None  # of the run, if known

    @property
    def pays(self) -> bool:
        unknown = self.steps is None and self.saved_s_per_step > 0
        return unknown or (self.steps or 0) * self.saved_s_per_step > self.cost_s

    def describe(self) -> str:
        taken, saved_s = f"compiling takes about {self.cost_s:.0f} s", self.saved_s_per_step
        if self.steps is not None:
            return f"{taken} and saves about {self.steps * saved_s:.2g} s"
        return f"{taken} and pays from {self.cost_s / saved_s:,.0f} steps on" if saved_s else ""


def estimate_compiling(work: StepWork, steps: int | None, layout: Layout) -> CompileEstimate:
    """Estimate compiling one rank's part of the work."""
    cost_s = START_COMPILER_S + COMPILE_OPERATION_S * work.operations
    return CompileEstimate(cost_s, SAVED_PER_ELEMENT_S * work.moved_elements / layout.ranks, steps)


@dataclass(frozen=True)
class Execution:
    """What a rank does with its part of a step."""

    compiled_layers: bool = False
    compiled_whole: bool = False
    recorded: bool = False  # one CUDA graph holds the whole step, update included
    channels_last: bool = False  # convolutions get their input with the channels innermost
    chunked_loss: bool = False  # the logits of all tokens never exist at once
    reason: NoGraphReason = NoGraphReason.ON_CPU
    detail: str = ""  # where in the model the reason is
    compiling: CompileEstimate | None = None  # what `train.compile=auto` was decided by, if it was
    uncompiled: str = ""  # why train.compile=on compiles nothing

    @property
    def compiled(self) -> bool:
        return self.compiled_layers or self.compiled_whole

    def describe(self) -> str:
        """Describe how the step runs, why it is not recorded, and what compiling costs, to follow "a step is"."""
        kernels = "compiled whole" if self.compiled_whole else "compiled by layer"
        why = f"{self.reason.value} ({self.detail})" if self.detail else self.reason.value
        if self.recorded:
            said = f"{kernels if self.compiled else 'not compiled'} and recorded as one CUDA graph"
        else:
            said = f"{kernels}, not recorded: {why}" if self.compiled else f"eager: {why}"
        said += ", channels last" if self.channels_last else ""
        said += f"; train.compile=on has no effect: {self.uncompiled}" if self.uncompiled else ""
        weighed = self.compiling.describe() if self.compiling and (self.recorded or self.compiled) else ""
        return f"{said} ({weighed})" if weighed else said


def decide_execution(
    train: Train, layout: Layout, target: Target, traits: Traits, weighed: CompileEstimate | None = None
) -> Execution:
    """Decide what is compiled, and whether the step is recorded; without `weighed`, compiling is assumed to pay."""
    reason = _why_not_recorded(train, layout, target, traits)
    recorded = reason is NoGraphReason.RECORDED
    possible = train.compile == "auto" and target.compiles and traits.compiles
    possible &= train.precision in HALF_PRECISIONS
    possible &= traits.equal_layers or recorded
    uncompiled = _why_not_compiled(target, traits) if train.compile == "on" else ""
    wanted = (train.compile == "on" and not uncompiled) or (possible and (weighed is None or weighed.pays))
    whole = wanted and recorded and not traits.equal_layers
    return Execution(
        wanted and not whole,
        whole,
        recorded,
        chunked_loss=traits.chunks_loss and target.kind == "cuda" and train.compile != "off",
        reason=reason,
        compiling=weighed if possible else None,
        uncompiled=uncompiled,
    )


def _why_not_compiled(target: Target, traits: Traits) -> str:
    if target.kind == "cuda" and not target.compiles:
        return "there is no C compiler, or no Triton; install gcc"
    return "" if traits.compiles else "torch's compiler cannot trace the model"


def _why_not_recorded(train: Train, layout: Layout, target: Target, traits: Traits) -> NoGraphReason:
    usual = train.weights == train.optimizer_state == "fp32"
    checks = (
        (train.compile != "off", NoGraphReason.COMPILE_OFF),
        (target.kind == "cuda", NoGraphReason.ON_CPU),
        (not traits.own_loop, NoGraphReason.OWN_LOOP),
        (train.precision in HALF_PRECISIONS or not traits.half_only, NoGraphReason.FULL_PRECISION),
        (layout.ranks == 1 and layout.plain, NoGraphReason.SEVERAL_RANKS),
        (layout.checkpointing == "none", NoGraphReason.LAYERS_RECOMPUTED),
        (layout.passes(layout.global_batch) == 1, NoGraphReason.ACCUMULATED),
        (usual and train.optimizer in RECORDED_OPTIMIZERS and not traits.own_optimizer, NoGraphReason.OPTIMIZER),
        (traits.few_shapes, NoGraphReason.MANY_SHAPES),
    )
    return next((reason for holds, reason in checks if not holds), NoGraphReason.RECORDED)
