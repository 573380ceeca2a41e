"""How work is spread over ranks and passes: the value that the planner prices and the runtime applies.

Ranks form a grid. The fastest-changing axis is `tensor`, whose ranks talk most and should share a node; then come
`shard` and `replicate`, the data-parallel axes; the slowest is `pipeline`, whose ranks only pass activations on.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from paceline.config import Parallel, RunSpec
from paceline.errors import Code, UserError

ZERO_STAGES = {"single": 0, "ddp": 0, "fsdp": 3, "hsdp": 3, "zero1": 1, "zero2": 2, "zero3": 3}
"""Strategies in the order in which people try them, and what each shards among data-parallel ranks, as ZeRO counts:
1 optimiser states, 2 gradients too, 3 weights too. zero3 is another name for fsdp."""
TWO_STAGE_SCHEDULES = {"interleaved", "zero_bubble"}
LAYOUT_FIELDS = (
    *("strategy", "ranks", "replicate", "tensor", "sequence", "pipeline", "schedule"),
    *("offload", "engine", "engine_config"),
)


@dataclass(frozen=True)
class Layout:
    strategy: str
    replicate: int
    """Groups of ranks that hold everything once."""
    global_batch: int
    micro_batch: int
    shard: int = 1
    """Ranks of a group that share its state; each has its own samples."""
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    sequence: bool = False
    checkpointing: str = "none"
    offload: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Count the ranks that have their own samples."""
        return self.replicate * self.shard

    @property
    def stages(self) -> int:
        """Count the parts into which a pipeline cuts the model."""
        return self.pipeline * (2 if self.schedule in TWO_STAGE_SCHEDULES and self.pipeline > 1 else 1)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel index of a rank; tensor and pipeline ranks get the same samples."""
        return rank // self.tensor % self.data

    def passes(self, samples: int) -> int:
        """Count the forward and backward passes of each rank over a global batch of that many samples."""
        if self.pipeline > 1:  # it always runs full: rounds of as many passes as it has ranks
            return self.pipeline * math.ceil(self.global_batch / (self.data * self.micro_batch * self.pipeline))
        return max(1, math.ceil(math.ceil(samples / self.data) / self.micro_batch))

    def equation(self) -> str:
        """Format the global batch as a product of what each rank does."""
        passes = self.passes(self.global_batch)
        ranks = f"{self.data} rank{'s' if self.data > 1 else ''}"
        each, left = divmod(self.global_batch, self.data * passes)
        per_pass = f"≈ {each} to {each + 1} per pass" if left else f"= {each} per pass"
        return f"{self.global_batch} global {per_pass} × {ranks} × {passes} accumulated"

    def grid(self) -> str:
        """Format the ranks as the product of the axes."""
        axes = (f"{name} {getattr(self, name)}" for name in ("replicate", "shard", "tensor", "pipeline"))
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} = {' × '.join(axes)}"

    @property
    def plain(self) -> bool:
        """Whether every rank holds the whole model, and only gradients are sent."""
        return self.strategy in ("single", "ddp") and self.tensor * self.pipeline == 1


EXAMPLES = "single, ddp:2, fsdp:4, hsdp:2x2, tensor:2+sequence, pipeline:2:gpipe, fsdp:2+tensor:2+pipeline:2"


def _error(message: str, key: str, code: Code = "conflict") -> UserError:
    key = key if key == "layout" or "." in key else f"parallel.{key}"
    return UserError(message, code=code, key=key)


def parse_layout(text: str) -> dict[str, Any]:
    """Parse a short form such as `fsdp:2+tensor:2` into values of the section `parallel`."""
    found: dict[str, Any] = {"strategy": "auto", "ranks": 1}
    words = text.split("+")
    kinds = ["strategy" if word.split(":")[0] in ZERO_STAGES else word.split(":")[0] for word in words]
    for word, kind in zip(words, kinds, strict=True):
        name, *rest = word.split(":")
        if kinds.count(kind) > 1:
            raise _error(f"{text!r} is not a layout: it names {kind} twice; write it as one of  {EXAMPLES}", "layout")
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
            case ("tensor", [ranks], []):
                found |= {"tensor": ranks, "ranks": found["ranks"] * ranks}
            case _:
                message = f"{text!r} is not a layout: {word!r} is not known; write it as one of  {EXAMPLES}"
                raise _error(message, "layout", "unknown-name")
    return found


def layout_of(spec: RunSpec) -> Layout:
    """Return the layout of a run file, or raise UserError before a process starts if it cannot work."""
    parallel, batch = spec.parallel, spec.train.global_batch
    data = _data_ranks(parallel)
    if not spec.entry.batched:
        batch = max(batch, data)
    same = {"auto": "ddp" if data > 1 else "single", "zero3": "fsdp"}
    strategy = same.get(parallel.strategy, parallel.strategy)
    if strategy == "single" and data > 1:
        but = f"but parallel.ranks={parallel.ranks}; use parallel.strategy=ddp"
        raise _error(f"parallel.strategy=single runs on 1 rank, {but}", "strategy")
    replicate, shard = _divide_data_ranks(parallel, strategy, data)
    _check_options(parallel, strategy)
    if parallel.reduce == "powersgd" and spec.train.precision == "fp16":
        raise _error(
            "parallel.reduce=powersgd keeps a part of each gradient for the next step, and train.precision=fp16 "
            "changes the scale of gradients between steps; use train.precision=bf16",
            "reduce",
        )
    if spec.train.precision == "fp8" and parallel.tensor > 1:
        raise _error(
            f"train.precision=fp8 scales whole matrices, and parallel.tensor={parallel.tensor} divides them; "
            "use train.precision=bf16, or parallel.tensor=1",
            "train.precision",
        )
    if batch < data:
        ranks = f"parallel.ranks={parallel.ranks}" if data == parallel.ranks else f"the {data} data-parallel ranks"
        use = f"use train.global_batch={data} or more" + f", or parallel.ranks={batch}" * (data == parallel.ranks)
        message = f"train.global_batch={batch} is smaller than {ranks}, and each needs a sample; {use}"
        raise _error(message, "train.global_batch")
    names = ("tensor", "pipeline", "schedule", "sequence", "offload")
    as_given: dict[str, Any] = {name: getattr(parallel, name) for name in names}
    as_given["checkpointing"] = parallel.activation_checkpointing
    return Layout(strategy, replicate, batch, _micro_batch(parallel, math.ceil(batch / data)), shard, **as_given)


def fix_strategy(spec: RunSpec) -> RunSpec:
    """Write out the strategy of `parallel: auto` on these ranks, so that no plan for the cluster replaces it."""
    if spec.cluster == "local" or spec.parallel.strategy != "auto":
        return spec
    return spec.replace({"parallel.strategy": layout_of(spec).strategy})


def _data_ranks(parallel: Parallel) -> int:
    each = parallel.tensor * parallel.pipeline
    data, left = divmod(parallel.ranks, each)
    if left or not data:
        product = f"parallel.tensor={parallel.tensor} × parallel.pipeline={parallel.pipeline}"
        below, above = parallel.ranks // each * each, (parallel.ranks // each + 1) * each
        use = f"{below} or {above}" if below else str(above)
        message = f"parallel.ranks={parallel.ranks} is not a multiple of {product} = {each}; use parallel.ranks={use}"
        raise _error(message, "ranks")
    return data


def _divide_data_ranks(parallel: Parallel, strategy: str, data: int) -> tuple[int, int]:
    """Divide the data-parallel ranks into (replicate, shard)."""
    if parallel.replicate is not None and strategy != "hsdp":
        message = f"parallel.replicate={parallel.replicate} is for parallel.strategy=hsdp, not {strategy}"
        raise _error(message, "replicate")
    if strategy != "hsdp":
        return (1, data) if ZERO_STAGES[strategy] else (data, 1)
    fits = [n for n in range(2, data) if data % n == 0]
    if not fits:
        use = "use 4 or more, or parallel.strategy=fsdp"
        raise _error(
            f"parallel.strategy=hsdp divides the data-parallel ranks twice, and there are {data}; {use}", "ranks"
        )
    copies = fits[0] if parallel.replicate is None else parallel.replicate
    if copies not in fits:
        near = min(fits, key=lambda n: abs(n - copies))
        wrong = f"does not divide {data} data-parallel ranks into groups of at least 2"
        raise _error(f"parallel.replicate={copies} {wrong}; use parallel.replicate={near}", "replicate")
    return copies, data // copies


def _check_options(parallel: Parallel, strategy: str) -> None:
    beside = parallel.tensor * parallel.pipeline > 1
    if strategy == "zero1" and beside:
        raise _error("parallel.strategy=zero1 excludes tensor and pipeline; use zero2, fsdp or ddp", "strategy")
    if parallel.sequence and parallel.tensor == 1:
        raise _error("parallel.sequence=true needs tensor parallelism; use it with parallel.tensor=2", "sequence")
    if parallel.offload and ZERO_STAGES[strategy] < 2 and parallel.engine == "torch":
        message = f"parallel.offload=true needs sharded parameters, not {strategy}; use parallel.strategy=fsdp"
        raise _error(message, "offload")
    saving = parallel.reduce != "exact"
    gathers = ZERO_STAGES[strategy] >= 2
    rounds = parallel.reduce in ("bf16", "fp16")
    if saving and (beside or strategy == "zero1" or (gathers and not rounds)):
        others = ", zero2, fsdp or hsdp" if rounds else ""
        message = f"parallel.reduce={parallel.reduce} is for data parallelism; use parallel.strategy=ddp{others} alone"
        raise _error(message, "reduce")
    if parallel.wrap != "layers" and parallel.engine != "torch" and gathers:
        message = f"parallel.wrap={parallel.wrap} is for parallel.engine=torch, not {parallel.engine}"
        raise _error(message, "wrap")
    if parallel.backend == "nccl" and parallel.device == "cpu":
        message = "parallel.backend=nccl connects CUDA devices, but parallel.device=cpu; use parallel.backend=gloo"
        raise _error(message, "backend")
    if parallel.engine == "torch" and parallel.engine_config is not None:
        raise _error(
            "parallel.engine_config is for parallel.engine=deepspeed or accelerate, not torch", "engine_config"
        )
    if parallel.engine != "torch" and (beside or saving):
        use = "use parallel.engine=torch for tensor, pipeline and reduce"
        raise _error(f"parallel.engine={parallel.engine} spreads data and optimiser state alone; {use}", "engine")


def _micro_batch(parallel: Parallel, per_rank: int) -> int:
    """Return the samples of one pass. A pipeline needs as many passes as ranks; twice that halves its bubble."""
    stages = parallel.pipeline
    if stages == 1:
        return min(parallel.micro_batch or per_rank, per_rank)
    if per_rank < stages:
        enough = stages * (parallel.ranks // (parallel.tensor * stages))
        raise _error(
            f"a pipeline of {stages} ranks needs {stages} passes of at least one sample, but a data-parallel rank has "
            f"{per_rank} per step; use train.global_batch={enough} or more, or parallel.pipeline={per_rank}",
            "pipeline",
        )
    wanted = parallel.micro_batch or max(1, per_rank // (2 * stages))
    passes = math.ceil(per_rank / wanted)
    if passes < stages:
        raise _error(
            f"parallel.micro_batch={wanted} makes {passes} pass{'es' * (passes > 1)} of {per_rank} samples per rank, "
            f"fewer than the {stages} ranks of the pipeline; use parallel.micro_batch={per_rank // stages} or less",
            "micro_batch",
        )
    return wanted
