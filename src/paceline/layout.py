"""How work is spread over ranks and passes: the value that the planner prices and the runtime applies.

Ranks form a grid. The fastest-changing axis is `tensor`, whose ranks talk most and should share a node; then comes
`context`, whose ranks share sequences, then `shard` and `replicate`, the data-parallel axes; the slowest is `pipeline`,
whose ranks only pass activations on.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import Parallel, RunSpec, Train
from paceline.config.sections import RingRanks
from paceline.errors import Code, UserError

ZERO_STAGES = {"single": 0, "ddp": 0, "fsdp": 3, "hsdp": 3, "zero1": 1, "zero2": 2, "zero3": 3}
"""Strategies in the order in which people try them, and what each shards among data-parallel ranks, as ZeRO counts:
1 optimiser states, 2 gradients too, 3 weights too. zero3 is another name for fsdp."""
TWO_STAGE_SCHEDULES = {"interleaved", "zero_bubble"}
MAX_GROUP = 32
"""Samples of a group of batch norm, by default: what people have on one device."""
HEAD_GROUPS = 4  # at most: the first waits for its keys alone, and each has kernels of its own
LAYOUT_FIELDS = (
    *("strategy", "ranks", "replicate", "tensor", "sequence", "context", "expert", "pipeline", "schedule"),
    *("offload", "engine", "engine_config"),
)
GRID = ("replicate", "shard", "context", "tensor", "pipeline")


@dataclass(frozen=True)
class Layout:
    strategy: str
    replicate: int  # groups of ranks that hold everything once
    global_batch: int
    micro_batch: int
    shard: int = 1  # ranks of a group that share its state; each has its own samples
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    sequence: bool = False
    checkpointing: str = "none"
    offload: bool = False
    context: int = 1  # ranks that divide each sequence
    ring: bool = False  # they pass its keys and values round
    expert: int = 1  # ranks, of those over which gradients are summed, that divide the experts

    @property
    def ranks(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Count the ranks that have their own samples."""
        return self.replicate * self.shard

    @property
    def summed_over(self) -> tuple[int, int]:
        """(replicate, shard) of the ranks over which gradients are summed, those of a sequence included."""
        if ZERO_STAGES[self.strategy]:
            return self.replicate, self.shard * self.context
        return self.replicate * self.context, self.shard

    @property
    def stages(self) -> int:
        """Count the parts into which a pipeline cuts the model."""
        return self.pipeline * (2 if self.schedule in TWO_STAGE_SCHEDULES and self.pipeline > 1 else 1)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel index of a rank; ranks of the other axes get the same samples."""
        return rank // (self.tensor * self.context) % self.data

    def passes(self, samples: int) -> int:
        """Count the forward and backward passes of each rank over a global batch of that many samples."""
        if self.pipeline > 1:  # it always runs full: rounds of as many passes as it has ranks
            return self.pipeline * math.ceil(self.global_batch / (self.data * self.micro_batch * self.pipeline))
        return max(1, math.ceil(math.ceil(samples / self.data) / self.micro_batch))

    def batchnorm_group(self, wanted: int | str) -> int:
        """Return the samples of a group of batch norm; auto is the most, up to 32, that divide a pass."""
        if isinstance(wanted, int):
            return wanted
        shares = self.data * self.passes(self.global_batch)
        each = math.ceil(self.global_batch / shares)
        parts = math.ceil(each / MAX_GROUP)
        if self.global_batch % shares == 0:
            parts = next(n for n in range(parts, each + 1) if each % n == 0)
        return math.ceil(each / parts)

    def equation(self) -> str:
        """Format the global batch as a product of what each rank does."""
        passes = self.passes(self.global_batch)
        ranks = f"{self.data} rank{'s' if self.data > 1 else ''}"
        each, left = divmod(self.global_batch, self.data * passes)
        per_pass = f"≈ {each} to {each + 1} per pass" if left else f"= {each} per pass"
        return f"{self.global_batch} global {per_pass} × {ranks} × {passes} accumulated"

    def grid(self) -> str:
        """Format the ranks as the product of the axes."""
        expert = f", of which {self.expert} divide the experts" if self.expert > 1 else ""
        axes = (f"{name} {getattr(self, name)}" for name in GRID if name != "context" or self.context > 1)
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} = {' × '.join(axes)}{expert}"

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes along which it divides the model or its sequences."""
        return tuple(axis for axis in ("tensor", "context", "expert", "pipeline") if getattr(self, axis) > 1)

    @property
    def family(self) -> str:
        """The name of what layouts have in common that differ in micro-batch, recomputation and offload alone."""
        strategy = f"hsdp {self.replicate}×{self.shard}" if self.strategy == "hsdp" else self.strategy
        axes = [
            f"{axis} {getattr(self, axis)}{' ring' * (axis == 'context' and self.ring)}" for axis in self.split_axes
        ]
        return " + ".join(axes if strategy == "single" and axes else [strategy, *axes])

    @property
    def plain(self) -> bool:
        """Return whether every rank holds the whole model, and only gradients are sent."""
        return self.held_whole and self.strategy != "zero1" and self.context == 1

    @property
    def held_whole(self) -> bool:
        """Return whether every rank holds the whole model."""
        return self.strategy in ("single", "ddp", "zero1") and self.tensor * self.pipeline * self.expert == 1

    @property
    def expert_groups(self) -> tuple[int, int]:
        """(replicate, shard) of the ranks that hold the same experts."""
        replicate, shard = self.summed_over
        return (replicate, shard // self.expert) if shard > 1 else (replicate // self.expert, shard)


EXAMPLES = (
    "single, ddp:2, fsdp:4, hsdp:2x2, tensor:2+sequence, context:2, context:4:ring, fsdp:4+expert:2, "
    "pipeline:2:gpipe, fsdp:2+tensor:2+pipeline:2"
)


def _error(message: str, key: str, code: Code = "conflict") -> UserError:
    return UserError(message, code=code, key=key if key == "layout" or "." in key else f"parallel.{key}")


def parse_layout(text: str) -> dict[str, Any]:
    """Parse a short form such as `fsdp:2+tensor:2` into values of the section `parallel`."""
    found: dict[str, Any] = {"strategy": "auto", "ranks": 1}
    words = text.split("+")
    kinds = ["strategy" if word.split(":")[0] in ZERO_STAGES else word.split(":")[0] for word in words]
    for word, kind in zip(words, kinds, strict=True):
        name, *rest = word.split(":")
        if kinds.count(kind) > 1:
            raise _error(f"{text!r} is not a layout: it names {kind} twice; write it as in  {EXAMPLES}", "layout")
        sized = bool(rest) and re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", rest[0]) is not None
        sizes = [int(size) for size in rest[0].split("x")] if sized else []
        match name, sizes, rest[1:]:
            case ("single", [], []) if not rest:
                found["strategy"] = name
            case ("sequence", [], []) if not rest:
                found["sequence"] = True
            case (("deepspeed" | "accelerate"), [], []) if not rest:
                found["engine"] = name
            case (("ddp" | "zero1" | "zero2" | "zero3" | "fsdp"), [ranks], []):
                found |= {"strategy": name, "ranks": found["ranks"] * ranks}
            case ("hsdp", [replicate, shard], []):
                found |= {"strategy": name, "replicate": replicate, "ranks": found["ranks"] * replicate * shard}
            case ("pipeline", [ranks], [] | [_]):
                found |= {"pipeline": ranks, "ranks": found["ranks"] * ranks}
                found |= {"schedule": rest[1]} if rest[1:] else {}
            case ("context", [ranks], ["ring"]):
                found |= {name: RingRanks(ranks), "ranks": found["ranks"] * ranks}
            case (("tensor" | "context"), [ranks], []):
                found |= {name: ranks, "ranks": found["ranks"] * ranks}
            case ("expert", [ranks], []):
                found["expert"] = ranks
            case _:
                reason = f"{text!r} is not a layout: {word!r} is not known; write it as in  {EXAMPLES}"
                raise _error(reason, "layout", "unknown-name")
    return found


def layout_of(spec: RunSpec) -> Layout:
    """Return the layout of a run file, or raise UserError before a process starts if it cannot work."""
    parallel, batch = spec.parallel, spec.train.global_batch
    data = _data_ranks(parallel)
    if not spec.entry.batched:
        batch = max(batch, data)
    same = {"auto": "ddp" if data * parallel.context > 1 else "single", "zero3": "fsdp"}
    strategy = same.get(parallel.strategy, parallel.strategy)
    if strategy == "single" and data * parallel.context > 1:
        advice = f"but parallel.ranks={parallel.ranks}; use parallel.strategy=ddp"
        raise _error(f"parallel.strategy=single runs on 1 rank, {advice}", "strategy")
    replicate, shard = _divide_data_ranks(parallel, strategy, data)
    _check_options(spec, strategy)
    _check_small_states(spec.train)
    least = min(spec.train.batch_schedule.values(), default=batch)
    if least < data:
        ranks = f"parallel.ranks={parallel.ranks}" if data == parallel.ranks else f"the {data} data-parallel ranks"
        use = f"train.global_batch={data} or more" + f", or parallel.ranks={least}" * (data == parallel.ranks)
        reason = f"train.global_batch={least} is smaller than {ranks}, and each needs a sample"
        raise _error(f"{reason}; use {use}", "train.global_batch")
    _check_expert(parallel, strategy, shard if ZERO_STAGES[strategy] else data)
    same_names = ("tensor", "sequence", "expert", "pipeline", "schedule")
    given: dict[str, Any] = {axis: getattr(parallel, axis) for axis in same_names}
    given |= {"context": int(parallel.context), "ring": isinstance(parallel.context, RingRanks)}
    given |= {"offload": parallel.offload, "checkpointing": parallel.activation_checkpointing}
    layout = Layout(strategy, replicate, batch, _micro_batch(parallel, math.ceil(batch / data)), shard, **given)
    _check_batchnorm_group(spec.train.batchnorm_group, layout)
    return layout


def _check_batchnorm_group(group: int | str, layout: Layout) -> None:
    """Raise UserError for groups of which passes would not have whole ones, and as many on each rank."""
    shares = layout.data * layout.passes(layout.global_batch)
    each, left = divmod(layout.global_batch, shares)
    if isinstance(group, int) and (group > each or (not left and each % group)):
        use = f"use {layout.batchnorm_group('auto')}" + f", or parallel.micro_batch={group}" * (each > group)
        reason = f"a pass has {f'{each} or {each + 1}' if left else each} samples, which are not whole groups"
        raise _error(f"train.batchnorm_group={group}: {reason}; {use}", "train.batchnorm_group")


def _check_expert(parallel: Parallel, strategy: str, ranks: int) -> None:
    ranks *= parallel.context
    if parallel.expert == 1:
        return
    reason = ""
    if ranks % parallel.expert:
        fits = [n for n in range(1, min(ranks, parallel.expert) + 1) if ranks % n == 0]
        reason = f"does not divide the {ranks} ranks that share a model; use parallel.expert={fits[-1]}"
    elif strategy == "zero1":
        reason = "divides weights, which strategy=zero1 keeps whole; use parallel.strategy=zero2, fsdp or ddp"
    elif parallel.wrap != "layers" or parallel.offload:
        reason = "excludes parallel.wrap and parallel.offload; leave them out"
    if reason:
        raise _error(f"parallel.expert={parallel.expert} {reason}", "expert")


def check_experts(layout: Layout, key: str, experts: int) -> None:
    """Raise UserError unless the ranks of `expert` can have equal parts of so many experts."""
    if layout.expert > 1 and (not experts or experts % layout.expert):
        fits = max(n for n in range(1, layout.expert) if experts % n == 0) if experts else 1
        reason = f"parallel.expert={layout.expert} does not divide {key}={experts}; use parallel.expert={fits}"
        raise _error(reason, "expert", "conflict" if experts else "not-supported")


def check_context(layout: Layout, key: str, tokens: int) -> None:
    """Raise UserError unless the ranks of `context` can have two chunks each of sequences of so many tokens."""
    chunks = 2 * layout.context
    if layout.context > 1 and tokens % chunks:
        fits = [n for n in range(2, layout.context) if tokens % (2 * n) == 0]
        reason = f"{layout.context} ranks need a multiple of {chunks} tokens, and {key}={tokens}"
        use = f"{key}={-(-tokens // chunks) * chunks}" + (f" or parallel.context={fits[-1]}" if fits else "")
        raise _error(f"parallel.context={layout.context}: {reason}; use {use}", "context")


def fix_strategy(spec: RunSpec) -> RunSpec:
    """Write out the strategy of `parallel: auto` on these ranks, so that no plan for the cluster replaces it."""
    if spec.cluster == "local" or spec.parallel.strategy != "auto":
        return spec
    return spec.replace({"parallel.strategy": layout_of(spec).strategy})


def _data_ranks(parallel: Parallel) -> int:
    axes: dict[str, int] = {axis: getattr(parallel, axis) for axis in ("tensor", "context", "pipeline")}
    each = math.prod(axes.values())
    data, left = divmod(parallel.ranks, each)
    if left or not data:
        shown = " × ".join(f"parallel.{axis}={n}" for axis, n in axes.items() if n > 1 or axis != "context")
        product = f"{shown} = {each}"
        use = f"{data * each} or {(data + 1) * each}" if data else str(each)
        reason = f"parallel.ranks={parallel.ranks} is not a multiple of {product}; use parallel.ranks={use}"
        raise _error(reason, "ranks")
    return data


def _divide_data_ranks(parallel: Parallel, strategy: str, data: int) -> tuple[int, int]:
    """Divide the data-parallel ranks into (replicate, shard)."""
    if strategy != "hsdp":
        if parallel.replicate is not None:
            reason = f"parallel.replicate={parallel.replicate} is for parallel.strategy=hsdp, not {strategy}"
            raise _error(reason, "replicate")
        return (1, data) if ZERO_STAGES[strategy] else (data, 1)
    fits = [n for n in range(2, data) if data % n == 0]
    if not fits:
        reason = f"parallel.strategy=hsdp divides the data-parallel ranks twice, and there are {data}"
        raise _error(f"{reason}; use 4 or more, or parallel.strategy=fsdp", "ranks")
    copies = fits[0] if parallel.replicate is None else parallel.replicate
    if copies not in fits:
        near = min(fits, key=lambda n: abs(n - copies))
        reason = f"parallel.replicate={copies} does not divide {data} data-parallel ranks into groups of at least 2"
        raise _error(f"{reason}; use parallel.replicate={near}", "replicate")
    return copies, data // copies


def _check_options(spec: RunSpec, strategy: str) -> None:
    """Raise UserError for options of the section that exclude each other."""
    for reason in _find_conflicts(spec, strategy):
        raise _error(f"parallel.{reason}", re.split("[= ]", reason)[0])
    if spec.train.precision == "fp8" and spec.parallel.tensor > 1:
        reason = f"fp8 scales whole matrices, and parallel.tensor={spec.parallel.tensor} divides them"
        use = "train.precision=bf16, or parallel.tensor=1"
        raise _error(f"train.precision={reason}; use {use}", "train.precision")


def _find_conflicts(spec: RunSpec, strategy: str) -> Iterator[str]:
    """Yield what cannot work together, from the key in `parallel` that is to be changed on."""
    parallel, train = spec.parallel, spec.train
    reduce, engine, least = parallel.reduce, parallel.engine, parallel.least_ranks
    each = parallel.tensor * parallel.context * parallel.pipeline
    beside, divided = parallel.tensor * parallel.pipeline > 1, each * parallel.expert > 1
    stage, rounds, own = ZERO_STAGES[strategy], reduce in ("bf16", "fp16"), engine == "torch"
    if strategy == "zero1" and beside:
        yield "strategy=zero1 excludes tensor and pipeline; use zero2, fsdp or ddp"
    if parallel.sequence and parallel.tensor == 1:
        yield "sequence=true needs tensor parallelism; use parallel.tensor=2"
    if isinstance(parallel.context, RingRanks) and parallel.context == 1:
        yield "context=1:ring needs a divided sequence; use 2:ring"
    if isinstance(parallel.context, RingRanks) and parallel.activation_checkpointing == "selective":
        kept = "activation_checkpointing=selective, which would keep the attention of each round"
        yield f"context={parallel.context} excludes {kept}; use none or full"
    if least is not None and parallel.ranks != least and parallel.ranks - each < least:
        reached = f"{parallel.ranks} ranks shrink by {each} (tensor × context × pipeline)"
        yield f"least_ranks={least} cannot be reached: {reached}; use fewer, or leave it out"
    if parallel.offload and stage < 2 and own:
        yield f"offload=true needs sharded parameters, not {strategy}; use parallel.strategy=fsdp"
    if reduce != "exact" and (divided or strategy == "zero1" or (stage >= 2 and not rounds)):
        others = ", zero2, fsdp or hsdp" * rounds
        yield f"reduce={reduce} is for data parallelism; use parallel.strategy=ddp{others} alone"
    if parallel.backend == "nccl" and parallel.device == "cpu":
        yield "backend=nccl connects CUDA devices, but parallel.device=cpu; use parallel.backend=gloo"
    if own and parallel.engine_config is not None:
        yield "engine_config is for parallel.engine=deepspeed or accelerate, not torch"
    usual = train.weights == train.optimizer_state == "fp32" and train.optimizer != "muon"
    by_size = parallel.wrap != "layers" and stage >= 2
    if not own and (divided or by_size or reduce != "exact" or not usual):
        alone = "spreads data and optimiser state alone, in fp32 and by layers, and not for muon"
        yield f"engine={engine} {alone}; use parallel.engine=torch for the rest"
    if parallel.offload and train.optimizer == "muon":
        yield "offload=true keeps matrices in host memory, and train.optimizer=muon gathers them; leave it out"
    if reduce in ("local_sgd", "diloco") and train.optimizer_state == "8bit":
        yield f"reduce={reduce} averages optimiser states, which train.optimizer_state=8bit packs; use bf16"
    if reduce == "powersgd" and train.precision == "fp16":
        scale = "train.precision=fp16 changes their scale; use train.precision=bf16"
        yield f"reduce=powersgd adds parts of gradients to later ones, and {scale}"


def _check_small_states(train: Train) -> None:
    """Raise UserError for values of `train` that exclude smaller states."""
    for key in ("weights", "optimizer_state"):
        given = f"train.{key}={getattr(train, key)}"
        if getattr(train, key) != "fp32" and train.optimizer not in ("adamw", "adam"):
            raise _error(f"{given} is for adamw and adam, not train.optimizer={train.optimizer}", f"train.{key}")
    if train.weights == "bf16" and train.precision not in ("bf16", "fp8"):
        raise _error(f"train.weights=bf16 needs train.precision=bf16, not {train.precision}", "train.weights")
    if train.weights == "bf16" and train.ema:
        raise _error(f"train.ema={train.ema:g} moves too little for train.weights=bf16; leave one out", "train.ema")


def _micro_batch(parallel: Parallel, per_rank: int) -> int:
    """Return the samples of one pass. A pipeline needs as many passes as ranks; twice that halves its bubble."""
    stages = parallel.pipeline
    if stages == 1:
        return min(parallel.micro_batch or per_rank, per_rank)
    wanted = parallel.micro_batch or max(1, per_rank // (2 * stages))
    if (passes := math.ceil(per_rank / wanted)) < stages:
        key, most = ("pipeline", per_rank) if per_rank < stages else ("micro_batch", per_rank // stages)
        has = f"the {per_rank} samples of a data-parallel rank are {passes} of micro_batch={wanted}"
        raise _error(f"a pipeline of {stages} ranks needs {stages} passes, and {has}; use parallel.{key}={most}", key)
    return wanted


def count_head_groups(heads: int) -> int:
    """Return in how many groups the heads of keys and values of a divided sequence are gathered."""
    return next(groups for groups in range(HEAD_GROUPS, 0, -1) if heads % groups == 0)


def divide_layers(costs: Sequence[float], before: float, after: float, parts: int) -> list[range]:
    """Return the layers of each part, the costliest part cheapest; the first also costs `before`, the last `after`."""
    assert len(costs) >= parts, "fewer layers than stages"

    def greedy(limit: float) -> list[range] | None:
        found, begin = [], 0
        for part in range(parts):
            spent, end = before if part == 0 else 0.0, begin
            most = len(costs) - (parts - part - 1)
            extra = after if part == parts - 1 else 0.0
            while end < most and (end == begin or spent + costs[end] + extra <= limit):
                spent += costs[end]
                end += 1
            if spent + extra > limit:
                return None
            found.append(range(begin, end))
            begin = end
        return found if begin == len(costs) else None

    sums = {sum(costs[i:j]) for i in range(len(costs)) for j in range(i + 1, len(costs) + 1)}
    limits = sorted({s + extra for s in sums for extra in (0.0, before, after, before + after)})
    return next(found for limit in limits if (found := greedy(limit * (1 + 1e-9))) is not None)
