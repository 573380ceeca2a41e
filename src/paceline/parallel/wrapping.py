"""How an untouched model is spread over ranks: the one place where layouts are applied, in an order that matters.

1. Pipeline cuts first: all that follows works on the layers this rank holds.
2. Tensor divides the matrices of those layers, which changes what their forward pass computes.
3. Activation checkpointing wraps each layer's forward pass as tensor left it, so that it is repeated as it was.
4. Compilation sees the whole of a layer, repetition included.
5. Data parallelism comes last: it must see the parameters as the optimiser does, and gathers a layer around all of
   the above.
6. A model that can draw its weights by itself is built without memory and gets it now, when each rank knows its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import UserError
from paceline.layout import Layout
from paceline.measuring.timers import Flights
from paceline.parallel import ddp
from paceline.parallel.compress import Exact, Saving, saving_of
from paceline.parallel.pieces import Pieces, pieces_of
from paceline.spec import RunSpec
from paceline.workload import Workload


@dataclass(frozen=True)
class Spread:
    """A model as one rank holds it."""

    net: nn.Module
    """What the loss is computed with."""
    parts: Sequence[nn.Module]
    """The modules this rank holds, with the names that checkpoints use; several only in a pipeline."""
    pieces: Pieces
    """What this rank updates."""
    parameters: int
    """Of the whole model."""
    same_samples: int = 1
    """Ranks that compute the loss of the same samples."""
    saving: Saving = field(default_factory=Exact)
    """How less than all gradients is sent."""

    @property
    def whole(self) -> nn.Module:
        """What evaluation is computed with: without the wrapper that sums gradients."""
        return self.net.module if isinstance(self.net, nn.parallel.DistributedDataParallel) else self.net


def parallelize(workload: Workload, layout: Layout, device: torch.device, spec: RunSpec, flights: Flights) -> Spread:
    kind = torch.float64 if spec.train.precision == "fp64" else torch.float32
    if layout.plain or layout.strategy == "zero1":
        return _whole(_model(workload).to(device, kind), workload, layout, device, spec, flights)

    from paceline.parallel import fsdp, pipeline, tensor
    from paceline.parallel.mesh import mesh_of

    mesh, group = mesh_of(layout, device, spec.parallel.timeout_s)
    late = workload.draws_by_name
    with torch.device("meta") if late else nullcontext():
        model = _model(workload).to(kind)
    if not late:
        model.to("cpu" if layout.offload else device)
        for tensor_of_main in (*model.parameters(), *model.buffers()):  # weights need not come from torch's generator
            dist.broadcast(tensor_of_main.detach(), src=0)

    parameters = _count(model)
    stages = {0: model}
    if layout.pipeline > 1:
        stages = pipeline.stages_of(workload, model, layout, mesh.get_local_rank("pipeline"))
    for stage in stages.values():
        blocks = workload.blocks(stage)
        if layout.tensor > 1:
            tensor.divide(stage, workload.shard_rules, mesh["tensor"], layout.sequence)
        _per_block(stage, blocks, layout, spec)
        if layout.data > 1 or layout.strategy in ("fsdp", "hsdp", "zero2"):
            fsdp.shard(stage, blocks, mesh, layout, flights)
        if late:
            stage.to_empty(device="cpu" if layout.offload else device)
            cast(Any, stage).initialise(spec.train.seed)

    parts = list(stages.values())
    pieces = pieces_of(parts, layout.tensor * layout.data, group)
    net: nn.Module = parts[0]
    if layout.pipeline > 1:
        net = pipeline.Pipeline(stages, layout, mesh, device, layout.passes(layout.global_batch))
    return Spread(net, parts, pieces, parameters, layout.tensor)


def prepared(workload: Workload, layout: Layout, spec: RunSpec) -> nn.Module:
    """The model before anything wraps it, in host memory: for engines that do so in their own way."""
    model = _model(workload).to(torch.float64 if spec.train.precision == "fp64" else torch.float32)
    _per_block(model, workload.blocks(model), layout, spec)
    return model


def _whole(
    model: nn.Module, workload: Workload, layout: Layout, device: torch.device, spec: RunSpec, flights: Flights
) -> Spread:
    """Every rank holds the model."""
    _per_block(model, workload.blocks(model), layout, spec)
    saving = saving_of(spec.parallel, model, flights)
    if layout.ranks == 1 or saving.alone:
        return Spread(model, [model], pieces_of([model], 1), _count(model), saving=saving)
    net = ddp.wrap(model, device, spec.parallel.bucket_mb, flights, saving.hook)
    if layout.strategy == "zero1":
        from paceline.parallel import zero1
        from paceline.parallel.mesh import mesh_of

        mesh, _ = mesh_of(layout, device, spec.parallel.timeout_s)
        pieces = zero1.shard_update(model, mesh["shard"], spec.parallel.bucket_mb, flights)
    else:
        pieces = pieces_of([model], layout.ranks)
    return Spread(net, [model], pieces, _count(model), saving=saving)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _per_block(model: nn.Module, blocks: Sequence[nn.Module], layout: Layout, spec: RunSpec) -> None:
    if layout.checkpointing != "none":
        if not blocks:
            raise UserError(
                f"parallel.checkpointing={layout.checkpointing}: the model has no repeated layers; "
                "give its Workload class a method  blocks(model) -> list of layers"
            )
        from paceline.parallel.recompute import recompute

        recompute(blocks, layout.checkpointing)
    if spec.train.compile == "on":
        for block in blocks or [model]:
            block.compile()


def _model(workload: Workload) -> nn.Module:
    found: object = workload.model()
    if not isinstance(found, nn.Module):
        raise UserError(f"workload: model() returned {type(found).__name__}; it must return a torch.nn.Module")
    if not any(p.requires_grad for p in found.parameters()):
        raise UserError(f"workload: the model ({type(found).__name__}) has no parameters to train")
    return found
