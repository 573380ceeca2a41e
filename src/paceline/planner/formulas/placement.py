"""The input of every price: how a step is divided among devices, in which types, how each runs it, and physics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class DtypeSizes:
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

    @property
    def updated_bytes(self) -> float:
        """Touched by an update, per parameter: weights and states read and written, gradients read for a norm too."""
        return 2 * (self.weight_bytes + self.state_bytes) + 3 * self.gradient_bytes


DTYPE_SIZES = {
    n.name: n
    for n in (
        DtypeSizes("fp64", "fp64", 8, 8, 8, 8, 8, 16),
        DtypeSizes("fp32", "fp32", 4, 4, 4, 4, 4, 8),
        DtypeSizes("tf32", "tf32", 4, 4, 4, 4, 4, 8),
        DtypeSizes("amp_fp16", "fp16", 2, 4, 4, 4, 2, 8, cast=True),
        DtypeSizes("amp_bf16", "bf16", 2, 4, 4, 4, 2, 8, cast=True),
        DtypeSizes("amp_fp8", "fp8", 2, 4, 4, 4, 2, 8, cast=True),
        DtypeSizes("fp16", "fp16", 2, 2, 2, 2, 2, 16),
        DtypeSizes("bf16", "bf16", 2, 2, 4, 4, 2, 12),
        DtypeSizes("fp8", "fp8", 2, 2, 4, 4, 2, 12),
        DtypeSizes("pure_bf16", "bf16", 2, 2, 2, 2, 2, 4),
    )
}


Kernels = Literal["eager", "fused", "compiled"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Reduce = Literal["exact", "bf16", "fp16", "powersgd", "local_sgd", "diloco"]
Offload = Literal["none", "states", "all"]


@dataclass(frozen=True)
class Runtime:
    """How a device runs its part of a step."""

    kernels: Kernels = "eager"
    """As written; with hand-fused norms, activations and casts; or compiled."""
    recorded: bool | None = None
    """Kernels are launched as one graph, without the host; None: if they are compiled."""
    overlap: bool = True
    """Gradients travel while the backward pass runs, weights are gathered ahead."""
    pieced_tensor: bool = True
    """Asynchronous tensor parallelism: its sums run in pieces beside the products they belong to."""
    fused_loss: bool = False
    """One kernel computes the loss and its gradient in the memory of the logits."""
    older_attention: bool = False
    """Fused attention written for the generation before the device's: flash attention 2 on Hopper, and not cuDNN's."""
    fused_update: bool = False
    """One kernel updates many tensors, instead of several kernels for each."""
    fused_norms: bool = False
    """A norm is one kernel, in the type of what it norms."""
    stops_early: bool = False
    """Recomputation ends where nothing more is needed: before a layer's last product."""
    fresh_gradients: bool = False
    """Gradients are dropped after each update: the next ones come as activations go."""
    keeps_casts: bool = False
    """Sharded weights are cast by autocast, which keeps the casts of all layers until the forward pass is over."""
    keeps_ends: bool = False
    """Sharded embedding and head stay gathered through a step."""

    @property
    def compiled(self) -> bool:
        return self.kernels == "compiled"

    @property
    def one_graph(self) -> bool:
        return self.compiled if self.recorded is None else self.recorded


@dataclass(frozen=True)
class Reduction:
    """How data-parallel ranks are synchronised: part of the run file, but not of the layout."""

    kind: Reduce = "exact"
    local_steps: int = 8
    """Steps of a rank between two averages of the models, if `kind` has them."""

    @property
    def joins_models(self) -> bool:
        """Weights are averaged every few steps, instead of gradients in every step."""
        return self.kind in ("local_sgd", "diloco")

    def sent_bytes(self, numbers: DtypeSizes) -> float:
        """Per parameter when gradients are reduced."""
        return 2.0 if self.kind in ("bf16", "fp16") else numbers.sent_bytes


@dataclass(frozen=True)
class Placement:
    """replicate × shard × context × tensor × pipeline devices, the batch that each passes, and how.

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
    zero: int = 0
    """States divided over `shard`: 1 the optimiser's, 2 gradients too, 3 weights too."""
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """Norms and residuals divided over `tensor` too."""
    chunks: int = 1
    """Stages per device of an interleaved pipeline."""
    schedule: Schedule = "1f1b"
    offload: Offload = "none"
    """In host memory: optimiser states, gradients and the update; or shards of the weights too."""
    runtime: Runtime = Runtime()
    reduction: Reduction = Reduction()

    def __post_init__(self) -> None:
        if self.zero and self.shards == 1 and self.offload != "all":
            object.__setattr__(self, "zero", 0)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Parts into which states are divided: devices that share a sequence hold different ones."""
        return self.shard * self.context

    @property
    def data(self) -> int:
        """Groups that see different samples."""
        return self.replicate * self.shard

    @property
    def global_batch(self) -> float:
        return self.micro_batch * self.accumulate * self.data


def _number(value: float, unit: str, meaning: str, low: float, high: float) -> Any:
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "low": low, "high": high})


@dataclass(frozen=True)
class Physics:
    """Every number of the planner that is not in a data sheet.

    They describe devices, links and frameworks in general; none belongs to one source, model or machine. A calibration
    of the present machine replaces some of them; nothing else does.
    """

    # compute
    matmul_efficiency: float = _number(0.93, "fraction", "of the best bare matrix product, in training", 0.8, 1)
    half_tiles: float = _number(19.0, "tiles", "of 128 × 128 results that keep a device half busy", 1, 400)
    ragged_efficiency: float = _number(0.54, "fraction", "left where a side is an odd multiple of 8", 0.3, 1)
    attention_efficiency: float = _number(0.5, "fraction", "of a large product, in fused attention", 0.2, 1)
    packed_efficiency: float = _number(0.5, "fraction", "of a large product, in attention over short texts", 0.2, 1)
    bandwidth_efficiency: float = _number(0.63, "fraction", "of the memory bandwidth, element-wise", 0.5, 1)
    fusion: float = _number(1.65, "passes", "element-wise traffic of eager kernels, of ideally fused ones", 0.8, 3)
    launch_s: float = _number(13.3e-6, "s", "host time per kernel launched", 4e-6, 2.5e-5)
    kernel_s: float = _number(3e-6, "s", "of a kernel to start and drain on the device", 1.5e-6, 6e-6)
    update_launches: float = _number(148.0, "kernels", "per layer, to scale, clip and update", 40, 400)
    # communication
    link_efficiency: float = _number(0.71, "fraction", "of the in-node link, in large collectives", 0.5, 1)
    node_efficiency: float = _number(0.81, "fraction", "of the network, in large collectives", 0.6, 0.95)
    link_latency_s: float = _number(3.6e-6, "s", "one hop of a collective inside a node", 2e-6, 5e-5)
    node_latency_s: float = _number(8.6e-6, "s", "one hop of a collective between nodes", 4e-6, 1e-4)
    call_s: float = _number(27e-6, "s", "start of one collective", 5e-6, 2e-4)
    overlap: float = _number(0.6, "fraction", "of communication hidden where compute runs beside it", 0, 1)
    jitter: float = _number(0.005, "fraction", "lost to the slowest rank, per doubling of the ranks", 0, 0.03)
    input_bytes_s: float = _number(
        2.5e9, "bytes/s", "of samples that one process reads, collates and copies", 5e8, 1e10
    )
    # memory
    context_bytes: float = _number(1.0e9, "bytes", "of the driver and the libraries on a device", 5e8, 2e9)
    communicator_bytes: float = _number(1.8e9, "bytes", "of buffers for each axis that communicates", 2e8, 4e9)
    fragmentation: float = _number(0.08, "fraction", "of activations, lost between allocations", 0.01, 0.5)
    bucket_bytes: float = _number(1.5e9, "bytes", "of flat buffers where states alone are divided", 5e8, 4e9)


CPU_PHYSICS = Physics(
    half_tiles=0.4,
    ragged_efficiency=1.0,
    bandwidth_efficiency=0.8,
    fusion=1.0,
    launch_s=1e-6,
    update_launches=0.0,
    node_efficiency=0.95,
    link_latency_s=5e-5,
    node_latency_s=1e-4,
    call_s=3e-4,
    overlap=0.0,
    context_bytes=3.5e8,  # a process with the libraries loaded
    communicator_bytes=0.0,
    bucket_bytes=0.0,
)
"""Of CPU cores and gloo: what calibrations of a few machines gave. The defaults are of GPUs and NCCL."""
