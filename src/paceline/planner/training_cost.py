"""The cost model of a training by gradient descent: its step is priced by blocks of the model."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, cast

from paceline.config import RunSpec, Train
from paceline.config.registry import StepWork, Traits
from paceline.execution import CPU, CUDA, decide_execution, estimate_compiling
from paceline.hardware.catalogue import Cluster, Device
from paceline.io.format import format_quantity, number, percent, size
from paceline.layout import ZERO_STAGES, Layout, divide_layers, layout_of
from paceline.planner.advice import advise_training
from paceline.planner.candidates import (
    UNKNOWN,
    LayoutSpace,
    PricedLayout,
    RejectedFamily,
    SplitOptions,
    constraints_of,
    name_situation,
)
from paceline.planner.cost_model import CostModel
from paceline.planner.formulas.memory import TrainingMemory, estimate_memory
from paceline.planner.formulas.placement import DTYPE_SIZES, DtypeSizes, Placement, Reduction, Runtime
from paceline.planner.formulas.shape import LAUNCHES_PER_OPERATION, BlockShape, find_repeated_block
from paceline.planner.formulas.simulation import Timeline, simulate_step
from paceline.planner.formulas.step_time import StepPricer
from paceline.planner.target import PricedCluster
from paceline.runlog.progress import COPY_BYTES_S, PauseSchedule

if TYPE_CHECKING:
    from paceline.planner.plan import Plan

CHECKPOINTING = ("none", "selective", "full")
MOMENTS = {"adamw": 2, "adam": 2, "lamb": 2, "sgd": 1, "lars": 1, "muon": 1}  # optimiser states per parameter
STATE_BLOCK = 256  # values of an 8-bit state that share one scale in fp32
DTYPE_NAMES = {"fp32": "fp32", "tf32": "tf32", "fp64": "fp64", "bf16": "amp_bf16", "fp16": "amp_fp16", "fp8": "amp_fp8"}
WORKSPACE_BYTES, THREADS = float(32 << 20), 2
"""Of cuBLAS, for each thread that uses it: one runs the forward pass, one the backward pass. A step that is recorded
runs on a stream of its own, which has them too if passes were made before."""
UNKNOWN_SAMPLES = "the number of samples is not known, so no hours; give it with  --samples N"
LAYER_BY_LAYER = "what is gathered is priced layer by layer, as with parallel.wrap=layers"
GROWS = "smaller batches at the start take as long per sample as the largest; steps are counted as if all were"
OPERATIONS_PER_LENGTH = 2  # for each distinct length in a batch, where attention runs length by length
LEAST_SAVE_S = 1.0  # ranks meet and open files, however little a checkpoint holds
SPREAD_SIGMAS = 3.0  # standard deviations between the fullest batch of a run and the mean one


def dtype_sizes_of(train: Train) -> DtypeSizes:
    """Return types as training uses them: weights in fp32 (fp64), cast for products; shards are sent as stored."""
    sizes = DTYPE_SIZES["pure_bf16" if train.weights == "bf16" else DTYPE_NAMES[train.precision]]
    moments = 0 if train.optimizer == "sgd" and not train.momentum else MOMENTS[train.optimizer]
    each = {"bf16": 2.0, "8bit": 1 + 4 / STATE_BLOCK}.get(train.optimizer_state, max(4.0, sizes.weight_bytes))
    state_bytes = moments * each + (sizes.weight_bytes if train.ema else 0)
    return replace(sizes, state_bytes=state_bytes, gathered_bytes=sizes.weight_bytes)


def steps_of(train: Train, samples: int | None) -> int | None:
    """Return the number of steps; of a batch that grows, in steps of the largest."""
    steps = train.steps
    if not steps and samples is not None:
        from paceline.data.order import Order, total_steps

        steps = total_steps(train, Order.of(train, samples))
    return math.ceil(train.count_samples(steps) / train.global_batch) if steps and train.batch_schedule else steps


@dataclass(frozen=True)
class LengthStats:
    """How samples differ in length."""

    longest_ratio: float = 1.0
    varies: float = 0.0  # standard deviation over the mean; 0 if unknown or constant
    distinct: float = 1.0
    """Distinct lengths in a very large batch, where attention runs length by length in fp32; else 1."""

    def fullest_batch_ratio(self, micro_batch: float) -> float:
        """Return the largest of all batches over the mean one; batches differ less than samples do."""
        if not self.varies:
            return self.longest_ratio
        return min(self.longest_ratio, 1 + SPREAD_SIGMAS * self.varies / math.sqrt(max(1.0, micro_batch)))

    def dealt_deviation(self, micro_batch: float) -> float:
        """Return the deviation of a rank's pass over the mean: long samples are dealt first, back and forth."""
        return self.varies / max(1.0, micro_batch)


@dataclass(frozen=True, kw_only=True)
class TrainingCostModel(CostModel):
    """A model by its blocks, and all that decides how it is trained."""

    blocks: tuple[BlockShape, ...]  # of a sample of mean length
    chunked_head: BlockShape | None = None  # replaces the last of them on a device that computes the loss in chunks
    packed_blocks: tuple[BlockShape, ...] | None = None  # of a recorded step, whose texts lie end to end
    packed_lengths: LengthStats = field(default_factory=LengthStats)
    train: Train
    traits: Traits = field(default_factory=Traits)
    reduction: Reduction = field(default_factory=Reduction)
    splits: SplitOptions = field(default_factory=SplitOptions)
    lengths: LengthStats = field(default_factory=LengthStats)
    sample_bytes: float = 0.0  # read from storage or host memory for each sample
    normalises_groups: bool = False  # batch norm has kernels of our own, which are faster than what is compiled
    probed: bool = False  # passes are made before the run, on another stream than a recorded step
    resident: bool = False  # all samples stay on the device of a recorded step, if it is long enough and has room
    held_out: int | None = None
    evaluation_chunk: int = 256
    narrow_gathers: bool = False
    """Sharded layers are cast before they are gathered; embedding and head are not, and stay gathered."""
    flat_buckets: bool = False
    """Gradients of zero1 and zero2 go through buffers of a fixed size, as DeepSpeed's do."""

    @classmethod
    def of(cls, spec: RunSpec, samples: int | None, **facts: Any) -> Self:
        """Build one from what the run file says of every training, and `facts` of this one."""
        unknown = samples is None and not spec.train.steps
        numbers = dtype_sizes_of(spec.train)
        if facts.get("narrow_gathers"):
            numbers = replace(numbers, gathered_bytes=2)
        blocks = facts["blocks"]
        if spec.train.weights == "bf16":  # all are, and none more than others
            facts["blocks"] = tuple(replace(block, half_params=0.0) for block in blocks)
        if spec.train.optimizer == "muon":  # embedding and head have the two moments of adamw
            share = sum(b.params for b in blocks if b.repeat == 1) / max(1.0, sum(b.repeat * b.params for b in blocks))
            numbers = replace(numbers, state_bytes=numbers.state_bytes + share * numbers.weight_bytes)
        given = {
            "name": spec.name,
            "workload": spec.workload,
            "global_batch": spec.train.global_batch,
            "numbers": numbers,
            "steps": steps_of(spec.train, samples),
            "samples": samples,
            "train": spec.train,
            "constraints": constraints_of(spec),
            "reduction": Reduction(cast(Any, spec.parallel.reduce), spec.parallel.local_steps),
            "flat_buckets": spec.parallel.engine == "deepspeed",
        }
        by_size = spec.parallel.wrap != "layers"
        assumptions = (*facts.pop("assumptions", ()), *[UNKNOWN_SAMPLES] * unknown, *[LAYER_BY_LAYER] * by_size)
        assumptions += (GROWS,) * bool(spec.train.batch_schedule)
        return cls(**{**given, **facts, "assumptions": assumptions})

    @property
    def params(self) -> float:
        return sum(b.repeat * b.params for b in self.blocks)

    @property
    def stored_params(self) -> float:
        return sum(b.repeat * b.stored_params for b in self.blocks)

    @property
    def trained_params(self) -> float:
        return sum(b.repeat * b.trained_params for b in self.blocks)

    @functools.cached_property
    def work(self) -> StepWork:
        """The work that compiling could shorten."""
        compiled = [find_repeated_block(self.blocks)] if self.traits.equal_layers else self.blocks
        times = [1 if self.traits.equal_layers else b.repeat for b in compiled]
        operations = sum(n * b.kernels for n, b in zip(times, compiled, strict=True)) / LAUNCHES_PER_OPERATION
        moved = sum(b.repeat * (b.moved_elements + b.eager_elements) for b in self.blocks)
        return StepWork(operations, 0.0 if self.normalises_groups else self.global_batch * moved)

    @property
    def flops_per_sample(self) -> float:
        return 3 * sum(b.repeat * b.flops for b in self.blocks)

    @property
    def divides_samples_only(self) -> bool:
        return not self.splits.splits or self.splits.inferred

    def headline(self) -> str:
        each = f" × {number(self.units_per_sample, 3)} {self.unit}" if self.unit != "samples" else ""
        steps = f", {self.steps:,} steps" if self.steps else ""
        trained = f" ({format_quantity(self.trained_params)} trained)" if self.trained_params < self.params else ""
        size = f"{format_quantity(self.params)} parameters{trained}, batch {self.global_batch:,}{each}"
        return f"{self.name}: {size}, {self.train.precision}{steps}"

    def layout_name(self, price: PricedLayout) -> str:
        return price.layout.family + (" *" if price.layout.offload else "")

    def layout(self, spec: RunSpec) -> Layout:
        return layout_of(spec)

    def families(self, devices: int, cluster: Cluster) -> Iterator[Layout | RejectedFamily]:
        fp8, fixed = self.numbers.matmul == "fp8", self.constraints
        return LayoutSpace(self.workload, self.global_batch, self.splits, fp8, devices, cluster, fixed).families()

    def members(self, family: Layout, offload: bool) -> Iterator[list[Layout]]:
        """Yield, for each way to recompute, the layouts from the largest micro-batch to the smallest."""
        if offload and ZERO_STAGES[family.strategy] < 2:
            return
        usual: tuple[str, ...] = CHECKPOINTING if self.splits.recomputes else CHECKPOINTING[:1]
        fixed = self.constraints.activation_checkpointing
        if family.ring:  # recomputing part of a layer would keep the attention of each round
            usual = tuple(how for how in usual if how != "selective")
        for checkpointing in usual if fixed is None else (fixed,):
            kind = replace(family, checkpointing=checkpointing, offload=offload)
            yield [replace(kind, micro_batch=size) for size in self._list_micro_batches(kind)]

    def _list_micro_batches(self, layout: Layout) -> list[int]:
        per_rank = math.ceil(layout.global_batch / layout.data)
        sizes = [max(1, per_rank // layout.pipeline) if layout.pipeline > 1 else per_rank]
        if self.constraints.micro_batch is not None:
            return [min(self.constraints.micro_batch, sizes[0])]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
        return sizes

    def schedules(self, layout: Layout) -> Iterator[Layout]:
        """Yield a pipeline with one stage per rank, then with two, which makes the bubble smaller."""
        yield layout
        whole = self.splits.layers % (2 * layout.pipeline) == 0 and not self.splits.inferred
        if layout.pipeline > 1 and self.constraints.schedule is None and whole:
            yield replace(layout, schedule="interleaved")

    def overrides(self, layout: Layout) -> dict[str, Any]:
        usual = Layout("", 1, 1, 1)
        names = ["strategy", "ranks", "micro_batch", *["replicate"] * (layout.strategy == "hsdp")]
        axes = ("tensor", "context", "expert", "pipeline", "sequence", "checkpointing", "offload")
        names += [name for name in axes if getattr(layout, name) != getattr(usual, name)]
        names += ["schedule"] * (layout.pipeline > 1)
        keys = {"checkpointing": "activation_checkpointing"}
        found = {f"parallel.{keys.get(name, name)}": getattr(layout, name) for name in names}
        return found | ({"parallel.context": f"{layout.context}:ring"} if layout.ring else {})

    def advice(self, plan: "Plan") -> Iterator[str]:
        return advise_training(self, plan)

    @property
    def pauses(self) -> PauseSchedule | None:
        """Evaluations and checkpoints; a held-out split of unknown size is taken for a large one."""
        if self.samples is None or self.steps is None:
            return None
        from paceline.data.order import Order, count_evaluated

        order = Order(self.samples, self.global_batch, self.train.seed)
        most = self.held_out if self.held_out is not None else self.samples
        used = count_evaluated(self.train, order, most, self.evaluation_chunk)
        return PauseSchedule.of(self.train, self.steps, order.steps_per_epoch, used)

    @property
    def checkpoint_bytes(self) -> float:
        return self.stored_params * self.numbers.weight_bytes + self.trained_params * self.numbers.state_bytes

    def pauses_s(self, price: PricedLayout) -> dict[str, float]:
        if (pauses := self.pauses) is None:
            return {}
        return {
            "evaluation_s": pauses.evaluations() * pauses.evaluate_s(1 / price.samples_s),
            "checkpoint_s": pauses.checkpoints_s(self.checkpoint_bytes / price.layout.ranks),
        }

    def save_s(self, price: PricedLayout) -> float:
        return LEAST_SAVE_S + self.checkpoint_bytes / price.layout.ranks / COPY_BYTES_S

    def checkpoint_steps(self) -> int | None:
        if self.train.checkpoint_every == "auto":
            return None
        return self.train.checkpoint_every or (self.pauses.checkpoint_every if self.pauses else None)

    def describe_pauses(self, price: PricedLayout) -> str:
        if (pauses := self.pauses) is None:
            return ""
        taken = self.pauses_s(price)
        total = price.start_s + pauses.steps * price.step_s + sum(taken.values())
        evaluations, checkpoints = pauses.evaluations(), pauses.checkpoints()
        words = [f"{checkpoints:,} checkpoint{'s' * (checkpoints > 1)} of {size(self.checkpoint_bytes)}"]
        if evaluations:
            words.insert(0, f"{evaluations:,} evaluation{'s' * (evaluations > 1)} on {pauses.evaluated:,} samples")
        return f"hours include {' and '.join(words)}, {percent(sum(taken.values()) / total)} of the run"

    @functools.cached_property
    def _cache(self) -> dict[Any, Any]:
        return {}

    def placement(self, layout: Layout, device: Device) -> Placement:
        """Translate a layout for the formulas. The slowest rank counts: the one with the most samples."""
        key = (layout, device.synchronous)
        if key in self._cache:
            return cast(Placement, self._cache[key])
        passes, zero = layout.passes(layout.global_batch), ZERO_STAGES[layout.strategy]
        self._cache[key] = found = Placement(
            *(
                layout.replicate,
                layout.shard,
                layout.tensor,
                layout.pipeline,
                layout.context,
                layout.ring,
                layout.expert,
            ),
            micro_batch=-(-layout.global_batch // layout.data) / passes,
            accumulate=passes,
            zero=zero,
            recompute=cast(Any, layout.checkpointing),
            sequence_parallel=layout.sequence,
            chunks=layout.stages // layout.pipeline,
            layers=self._count_first_layers(layout.stages, layout.pipeline),
            schedule=cast(Any, layout.schedule),
            offload="none" if not layout.offload else "all" if zero == 3 else "states",
            reduction=self.reduction,
            runtime=self._runtime(layout, device, sharded=zero == 3),
        )
        return found

    def _count_first_layers(self, stages: int, ranks: int) -> int:
        """Count the layers of the first rank of a pipeline, whose last has the head as well; 0 without one."""
        layer, head = find_repeated_block(self.blocks), self.blocks[-1]
        if ranks == 1 or stages > layer.repeat:
            return 0
        if (key := (stages, ranks)) not in self._cache:
            masked, before = 0.0, 0.0
            if not self.splits.inferred:  # `costs` of a workload counts half of the scores, and the embedding
                masked = layer.attention.flops / 2 if layer.attention else 0.0
                before = self.blocks[0].saved_whole_elements
            parts = divide_layers([layer.flops - masked] * layer.repeat, before, head.flops, stages)
            self._cache[key] = sum(map(len, parts[::ranks]))
        return cast(int, self._cache[key])

    def _runtime(self, layout: Layout, device: Device, sharded: bool) -> Runtime:
        """Decide what is compiled on a device, and what stays in its memory."""
        weighed = estimate_compiling(self.work, self.steps, layout) if self.train.compile == "auto" else None
        eager = self.splits.inferred and layout.tensor * layout.pipeline > 1
        traits = replace(self.traits, compiles=self.traits.compiles and not eager)
        execution = decide_execution(self.train, layout, CPU if device.synchronous else CUDA, traits, weighed)
        one_pass = layout.passes(layout.global_batch) == 1 and layout.pipeline == 1
        return Runtime(
            kernels="compiled" if execution.compiled else "eager",
            recorded=execution.recorded,
            pieced_tensor=False,
            fused_update=True,
            fused_norms=not device.synchronous,
            channels_last=not execution.compiled and self.train.compile != "off",
            stops_early=True,
            fresh_gradients=one_pass and (sharded or layout.strategy == "single"),
            keeps_casts=sharded and not self.narrow_gathers,
            keeps_ends=sharded and self.narrow_gathers,
            waits_for_keys=True,
        )

    def memory(self, layout: Layout, where: PricedCluster) -> TrainingMemory:
        """Estimate the memory of the fullest device, with the longest samples in one pass."""
        device = where.cluster.device
        key = (layout, device.synchronous, where.physics)
        if key in self._cache:
            return cast(TrainingMemory, self._cache[key])
        placement = self.placement(layout, device)
        packed = self._packs(placement.runtime)
        lengths, blocks = self.packed_lengths if packed else self.lengths, self._blocks_on(device, placement.runtime)
        fullest = lengths.fullest_batch_ratio(placement.micro_batch)
        filled = placement if fullest == 1 else replace(placement, micro_batch=placement.micro_batch * fullest)
        found = estimate_memory(blocks, filled, self.numbers, where.physics)
        buffers = found.buffers_bytes if self.flat_buckets else 0.0
        if not device.synchronous:
            recorded = placement.runtime.one_graph
            streams = 2 if recorded and self.probed else 1
            buffers += THREADS * WORKSPACE_BYTES * streams + self._resident_bytes() * recorded
        if placement.zero == 2:  # weights stay gathered, beside the shard that the update works on
            buffers += found.weights_bytes / placement.shards
        found = replace(found, buffers_bytes=buffers)
        if placement.zero == 2 and self.narrow_gathers:  # layers are gathered in 16 bits, and not cast again
            layer, numbers = find_repeated_block(self.blocks), self.numbers
            held = layer.repeat / (placement.pipeline * placement.tensor)
            gathered = held * (layer.stored_params - layer.elsewhere(placement.expert))
            less = gathered * (numbers.weight_bytes - numbers.gathered_bytes)
            casts = max(0.0, found.casts_bytes - held * layer.cast_params * numbers.element_bytes)
            found = replace(found, weights_bytes=found.weights_bytes - less, casts_bytes=casts)
        return cast(TrainingMemory, self._cache.setdefault(key, found))

    def _resident_bytes(self) -> float:
        samples = self.samples or 0
        seen = self.steps is None or self.steps * self.global_batch >= samples
        return samples * self.sample_bytes if self.resident and seen else 0.0

    def price(self, layout: Layout, where: PricedCluster) -> PricedLayout:
        pricer = self._step_pricer(layout, where)
        placement, time = pricer.placement, pricer.price()
        read_s = placement.micro_batch * placement.accumulate * self.sample_bytes / where.physics.input_bytes_s
        if read_s > time.step_s:  # batches are prefetched during the step
            time = replace(time, data_s=read_s - time.step_s)
        situation = self._name_situation(layout, where)
        return PricedLayout(layout, where, time, self.memory(layout, where), situation=situation)

    def _name_situation(self, layout: Layout, where: PricedCluster) -> str:
        """Name how work is spread; nobody published offloaded states, cores, experts or other modules."""
        published = any(b.attention for b in self.blocks) and not any(b.expert_params for b in self.blocks)
        if not published or layout.offload or where.cluster.device.synchronous:
            return UNKNOWN
        return name_situation(layout.pipeline, layout.tensor, ZERO_STAGES[layout.strategy], layout.ranks)

    def _step_pricer(self, layout: Layout, where: PricedCluster) -> StepPricer:
        placement = self.placement(layout, where.cluster.device)
        blocks = self._add_length_launches(placement, where.cluster.device)
        uneven = self.lengths.dealt_deviation(placement.micro_batch)
        return StepPricer(blocks, placement, where.cluster, self.numbers, where.physics, uneven)

    def timeline(self, price: PricedLayout) -> Timeline:
        played = simulate_step(self._step_pricer(price.layout, price.where))
        return replace(played, step_s=played.step_s + price.time.data_s)

    def _packs(self, runtime: Runtime) -> bool:
        return self.packed_blocks is not None and bool(runtime.recorded)

    def _blocks_on(self, device: Device, runtime: Runtime) -> tuple[BlockShape, ...]:
        if self.packed_blocks is not None and self._packs(runtime):
            return self.packed_blocks
        chunked = self.chunked_head is not None and not device.synchronous and self.train.compile != "off"
        return (*self.blocks[:-1], cast(BlockShape, self.chunked_head)) if chunked else self.blocks

    def _add_length_launches(self, placement: Placement, device: Device) -> tuple[BlockShape, ...]:
        """Add the kernels that a batch with samples of different lengths launches."""
        blocks = self._blocks_on(device, placement.runtime)
        half_on_gpu = self.numbers.element_bytes == 2 and not device.synchronous
        if self.lengths.distinct <= 1 or half_on_gpu:
            return blocks
        distinct = self.lengths.distinct * (1 - (1 - 1 / self.lengths.distinct) ** placement.micro_batch)
        more = LAUNCHES_PER_OPERATION * OPERATIONS_PER_LENGTH * max(0.0, distinct - 1)
        return tuple(replace(b, kernels=b.kernels + more) if b.attention else b for b in blocks)

    def with_precision(self, precision: str) -> Self:
        """Return the same training with products in another type."""
        kind = DTYPE_SIZES[DTYPE_NAMES[precision]]
        numbers = replace(kind, state_bytes=self.numbers.state_bytes, gathered_bytes=kind.weight_bytes)
        return replace(self, numbers=numbers, train=self.train.model_copy(update={"precision": precision}))
