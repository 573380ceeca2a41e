"""How a step is spread over devices, and in which types it is computed, kept and sent: the input of every price."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UserError

Kernels = Literal["eager", "fused", "compiled"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Reduce = Literal["exact", "bf16", "fp16", "powersgd", "local_sgd", "diloco"]


@dataclass(frozen=True)
class Numbers:
    """The types of a run, as bytes per parameter or element."""

    name: str
    matmul: str
    """Type of the matrix products, as the catalogue names its rates."""
    element_bytes: float
    weight_bytes: float
    gradient_bytes: float
    sent_bytes: float
    """Per parameter when gradients are reduced."""
    gathered_bytes: float
    """Per parameter when sharded weights are gathered."""
    state_bytes: float
    """Adam's moments, master weights, and the fp32 copy of 16-bit gradients that the update reads, per parameter."""
    cast: bool = False
    """Weights are kept in fp32 and cast for every pass (autocast)."""


NUMBERS = {
    n.name: n
    for n in (
        Numbers("fp64", "fp64", 8, 8, 8, 8, 8, 16),
        Numbers("fp32", "fp32", 4, 4, 4, 4, 4, 8),
        Numbers("tf32", "tf32", 4, 4, 4, 4, 4, 8),
        Numbers("amp_fp16", "fp16", 2, 4, 4, 4, 2, 8, cast=True),
        Numbers("amp_bf16", "bf16", 2, 4, 4, 4, 2, 8, cast=True),
        Numbers("amp_fp8", "fp8", 2, 4, 4, 4, 2, 8, cast=True),
        Numbers("fp16", "fp16", 2, 2, 2, 2, 2, 16),
        Numbers("bf16", "bf16", 2, 2, 4, 4, 2, 12),
        Numbers("fp8", "fp8", 2, 2, 4, 4, 2, 12),
        Numbers("pure_bf16", "bf16", 2, 2, 2, 2, 2, 4),
    )
}


def numbers(name: str) -> Numbers:
    if name not in NUMBERS:
        close = difflib.get_close_matches(name, NUMBERS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise UserError(f"precision {name!r} is not known{hint}; use one of {', '.join(NUMBERS)}")
    return NUMBERS[name]


@dataclass(frozen=True)
class Spread:
    """replicate × shard × context × tensor × pipeline devices, and the batch that each passes.

    Neighbouring devices hold the parts of one tensor, then of one sequence, then the shards, the replicas, the stages.
    """

    replicate: int = 1
    """Groups that hold the same states and see other samples."""
    shard: int = 1
    """Devices that divide the states among them and see other samples."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batch: float = 1
    """Samples of one pass of one group."""
    accumulate: int = 1
    """Passes per optimiser step."""
    zero: int = 0
    """States divided over `shard`: 1 the optimiser's, 2 gradients too, 3 weights too."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """Norms and residuals divided over `tensor` too."""
    chunks: int = 1
    """Stages per device of an interleaved pipeline."""
    overlap: bool = True
    """Gradients travel while the backward pass runs, weights are gathered ahead."""
    kernels: Kernels = "eager"
    """The framework's own; with hand-fused norms, activations and casts; or compiled."""
    recorded: bool = True
    """Compiled kernels are launched as one graph, without the host."""
    offload: bool = False
    """Optimiser states, gradients and the update live in host memory."""
    offload_weights: bool = False
    """Shards of the weights too: they come over the bus before every gather."""
    schedule: Schedule = "1f1b"
    """Order of the passes in a pipeline."""
    reduce: Reduce = "exact"
    """How plain data-parallel ranks are kept together."""
    keeps_casts: bool = False
    """Sharded weights are cast by autocast, which keeps the casts of all layers until the forward pass is over."""
    stops_early: bool = False
    """Recomputation ends where nothing more is needed: before a layer's last product."""
    fresh_gradients: bool = False
    """Gradients are dropped after each update: the next ones come as activations go."""
    keeps_ends: bool = False
    """Sharded embedding and head stay gathered through a step."""
    fused_update: bool = False
    """One kernel updates many tensors, instead of several kernels for each."""
    local_steps: int = 1
    """Steps that a rank makes alone before models are joined."""

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "tensor", "pipeline", "context", "accumulate", "chunks"):
            if getattr(self, name) < 1:
                raise UserError(f"parallel.{name}={getattr(self, name)} is not possible; give 1 or more")
        if self.micro_batch <= 0:
            raise UserError(f"parallel.micro_batch={self.micro_batch} is not possible; give more than 0")
        if self.zero and self.shard == 1 and not self.offload_weights:
            object.__setattr__(self, "zero", 0)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Groups that see different samples."""
        return self.replicate * self.shard

    @property
    def global_batch(self) -> float:
        return self.micro_batch * self.accumulate * self.data
