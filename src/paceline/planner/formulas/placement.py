"""The input of every price: how a step is divided among devices, in which types, how each runs it, and physics."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


def read_table(file: str) -> list[dict[str, str]]:
    """Read the rows of a CSV file beside this module."""
    with Path(__file__).with_name(file).open(encoding="utf-8", newline="") as rows:
        return list(csv.DictReader(rows))


@dataclass(frozen=True)
class DtypeSizes:
    name: str
    matmul: str  # type of the matrix products, as the catalogue names its rates
    element_bytes: float
    weight_bytes: float
    gradient_bytes: float
    sent_bytes: float  # per parameter when gradients are reduced
    gathered_bytes: float  # per parameter when sharded weights are gathered
    state_bytes: float
    """Adam's moments, master weights, and the fp32 copy of 16-bit gradients that the update reads, per parameter."""
    cast: bool = False  # weights are kept in fp32 and cast for every pass (autocast)

    @property
    def updated_bytes(self) -> float:
        """Return the bytes an update touches per parameter: weights and states twice, gradients also for a norm."""
        return 2 * (self.weight_bytes + self.state_bytes) + 3 * self.gradient_bytes


def _read_dtype_sizes(name: str, matmul: str, cast: str, **sizes: str) -> DtypeSizes:
    return DtypeSizes(name, matmul, **{key: int(size) for key, size in sizes.items()}, cast=cast == "yes")


DTYPE_SIZES = {row["name"]: _read_dtype_sizes(**row) for row in read_table("dtypes.csv")}
Kernels = Literal["eager", "fused", "compiled"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Reduce = Literal["exact", "bf16", "fp16", "powersgd", "local_sgd", "diloco"]
Offload = Literal["none", "states", "all"]


@dataclass(frozen=True)
class Runtime:
    """How a device runs its part of a step."""

    kernels: Kernels = "eager"  # as written; with hand-fused norms, activations and casts; or compiled
    recorded: bool | None = None
    """Kernels are launched as one graph, without the host; None: if they are compiled."""
    overlap: bool = True  # gradients travel while the backward pass runs, weights are gathered ahead
    pieced_tensor: bool = True
    """Asynchronous tensor parallelism: its sums run in pieces beside the products they belong to."""
    fused_loss: bool = False  # one kernel computes the loss and its gradient in the memory of the logits
    older_attention: bool = False
    """Fused attention written for the generation before the device's: flash attention 2 on Hopper, and not cuDNN's."""
    fused_update: bool = False  # one kernel updates many tensors, instead of several kernels for each
    fused_norms: bool = False  # a norm is one kernel, in the type of what it norms
    stops_early: bool = False  # recomputation ends where nothing more is needed: before a layer's last product
    fresh_gradients: bool = False
    """Gradients are dropped after each update: the next ones come as activations go."""
    keeps_casts: bool = False
    """Sharded weights are cast by autocast, which keeps the casts of all layers until the forward pass is over."""
    channels_last: bool = False  # images have their channels innermost where that is faster
    keeps_ends: bool = False  # sharded embedding and head stay gathered through a step
    waits_for_keys: bool = False  # attention begins when the keys of the first heads of a divided sequence are gathered

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
    local_steps: int = 8  # steps of a rank between two averages of the models, if `kind` has them

    def sent_bytes(self, numbers: DtypeSizes) -> float:
        """Return the bytes sent per parameter when gradients are reduced."""
        return 2.0 if self.kind in ("bf16", "fp16") else numbers.sent_bytes


@dataclass(frozen=True)
class Placement:
    """replicate × shard × context × tensor × pipeline devices, the batch that each passes, and how.

    Neighbouring devices hold the parts of one tensor, then of one sequence, then the shards, the replicas, the stages.
    """

    replicate: int = 1  # groups that hold the same states and see other samples
    shard: int = 1  # devices that divide the states among them and see other samples
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    ring: bool = False  # those of `context` pass keys and values round, instead of gathering them
    expert: int = 1  # of the devices with other samples, those that divide the experts
    micro_batch: float = 1  # samples of one pass of one group
    accumulate: int = 1
    zero: int = 0  # states divided over `shard`: 1 the optimiser's, 2 gradients too, 3 weights too
    recompute: Recompute = "none"
    sequence_parallel: bool = False  # norms and residuals divided over `tensor` too
    chunks: int = 1  # stages per device of an interleaved pipeline
    layers: int = 0  # of the first device of a pipeline; 0: an equal part
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
        """Return into how many parts states are divided: devices that share a sequence hold different ones."""
        return self.shard * self.context

    @property
    def data(self) -> int:
        """Return the number of groups that see different samples."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class Physics:
    """Every number of the planner that is not in a data sheet; `physics.csv` has units, limits and meanings.

    They describe devices, links and frameworks in general; none belongs to one source, model or machine. A calibration
    of the present machine replaces some of them; nothing else does.
    """

    matmul_efficiency: float
    half_tiles: float
    ragged_efficiency: float
    attention_efficiency: float
    packed_efficiency: float
    bandwidth_efficiency: float
    fusion: float
    launch_s: float
    kernel_s: float
    update_launches: float
    link_efficiency: float
    node_efficiency: float
    link_latency_s: float
    node_latency_s: float
    call_s: float
    overlap: float
    spread: float
    input_bytes_s: float
    context_bytes: float
    communicator_bytes: float
    fragmentation: float
    bucket_bytes: float


PHYSICS_TABLE = {row["name"]: row for row in read_table("physics.csv")}
GPU_PHYSICS, CPU_PHYSICS = (
    Physics(**{name: float(row[kind]) for name, row in PHYSICS_TABLE.items()}) for kind in ("gpu", "cpu")
)
"""With NCCL; with gloo, from calibrations of a few machines."""
