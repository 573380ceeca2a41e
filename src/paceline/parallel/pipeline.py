"""Each rank holds some consecutive layers; torch.distributed.pipelining orders the passes."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from paceline.errors import UserError, reject_value
from paceline.launch.shared_device import route_through_host
from paceline.layout import TWO_STAGE_SCHEDULES, Layout, divide_layers
from paceline.nn.keyed_dropout import KeyedPasses
from paceline.parallel.parameters import LocalParameter, LocalParameters, find_shared_parameters
from paceline.workload import Workload

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages hold: its name, and that which it has in each of them."""

    name: str
    held: Mapping[int, str]


def tie_parameters(
    local: LocalParameters, ties: Sequence[Tie], layout: Layout, ahead: DeviceMesh, back: DeviceMesh
) -> LocalParameters:
    """Sum gradients of tied parameters over stages; begin with values of the one that names them."""
    rank, device = ahead.get_local_rank("pipeline"), local[0].data.device
    up, down = (route_through_host(mesh["pipeline"].get_group(), device) for mesh in (ahead, back))
    found, shared = {part.name: part for part in local}, list[tuple[LocalParameter, list[int]]]()
    for tie in ties:
        ranks = {stage % layout.pipeline: name for stage, name in tie.held.items()}
        if rank in ranks and ranks[rank] in found:
            own = found[ranks[rank]] = replace(found[ranks[rank]], name=tie.name, stages=len(ranks))
            shared.append((own, sorted(ranks)))
            first = min(ranks, key=lambda stage: (ranks[stage] != tie.name, stage))
            for other in sorted(ranks.keys() - {first}) if rank == first else ():
                dist.send(own.data, group=up if other > rank else down, group_dst=other)
            if rank != first:
                dist.recv(own.data, group=up if first < rank else down, group_src=first)

    def sum_gradients() -> None:
        for part, ranks in shared:
            own = torch.zeros_like(part.data) if part.data.grad is None else part.data.grad
            sent, parts = [], {rank: own}
            for other in (other for other in ranks if other != rank):
                parts[other] = torch.empty_like(own, memory_format=torch.contiguous_format)
                sent.append(dist.isend(own.contiguous(), group=up if other > rank else down, group_dst=other))
                dist.recv(parts[other], group=up if other < rank else down, group_src=other)
            for work in sent:
                cast(Any, work).wait()
            part.data.grad = torch.stack([parts[other] for other in ranks]).sum(0)

    return LocalParameters(list(found.values()), local.group, local.after_update, sum_gradients) if shared else local


def build_stages(
    workload: Workload, model: nn.Module, layout: Layout, pipeline_rank: int
) -> tuple[dict[int, nn.Module], list[Tie]]:
    """Return a rank's stages by index, cut by what layers cost; and parameters of several stages."""
    before, costs, after = workload.costs(model)
    if len(costs) < layout.stages:
        advice = f"use parallel.pipeline={len(costs) * layout.pipeline // layout.stages}"
        raise pipeline_error(layout, f"{layout.stages} stages, but the model has {len(costs)} layers; {advice}")
    stages = [workload.stage(model, layers) for layers in divide_layers(costs, before, after, layout.stages)]
    ties = [Tie(name, {first: name, second: name}) for name, first, second in find_shared_parameters(stages)]
    for index, stage in enumerate(stages):
        if not any(p.requires_grad for p in stage.parameters()):
            raise pipeline_error(layout, f"all parameters of stage {index} are frozen; use fewer stages, or fsdp")
    return {index: stages[index] for index in range(pipeline_rank, layout.stages, layout.pipeline)}, ties


def pipeline_error(layout: Layout, reason: str) -> UserError:
    return reject_value("parallel.pipeline", f"{layout.pipeline}, schedule={layout.schedule}", reason)


class Pipeline(nn.Module):
    """The stages of one rank; called like the model to evaluate, by `step` to train."""

    def __init__(
        self, stages: dict[int, nn.Module], layout: Layout, mesh: DeviceMesh, device: torch.device, micro_batches: int
    ) -> None:
        super().__init__()
        if layout.schedule == "zero_bubble" and torch.__version__ < "2.13":
            raise pipeline_error(layout, "needs torch 2.13; use parallel.schedule=interleaved")
        self.stages, self.count, self.device = stages, layout.stages, device
        self.group = route_through_host(mesh["pipeline"].get_group(), device)
        self.rank, self.ranks = mesh.get_local_rank("pipeline"), layout.pipeline
        self.first, self.last = 0 in stages, layout.stages - 1 in stages
        self._loss: Callable[[Tensor, Tensor], Tensor] = lambda output, index: output
        for stage in stages.values():
            stage.register_forward_pre_hook(KeyedPasses([stage]).take_keys, prepend=True, with_kwargs=True)
            if getattr(stage, "expert_load", None) is not None:
                stage.register_forward_pre_hook(partial(_forget_trial, itertools.count()))
        built = [pipelining.PipelineStage(s, i, layout.stages, device, group=self.group) for i, s in stages.items()]
        self.schedule = SCHEDULES[layout.schedule](
            built if layout.schedule in TWO_STAGE_SCHEDULES else built[0],
            micro_batches,
            loss_fn=lambda output, index: self._loss(output, index),
            scale_grads=False,
        )

    def train(self, mode: bool = True) -> "Pipeline":
        for stage in self.stages.values():
            stage.train(mode)
        return super().train(mode)

    def step(self, first: Tensor, every: dict[str, Tensor], loss: Callable[[Tensor, int], Tensor], count: int) -> None:
        """Run `count` micro-batches: `first` to the first stage, `every` to all; `loss` gets (output, index)."""
        self._loss = lambda output, index: loss(output, int(index[0]))
        rows = len(first) // count
        inputs = (first,) if self.first else ()
        indices = torch.arange(count).repeat_interleave(rows)
        options: dict[str, Any] = {"target": indices, "losses": []} if self.last else {}
        self.schedule.step(*inputs, **options, **every, return_outputs=False)

    def forward(self, first: Tensor, **every: Tensor) -> Tensor:
        """Return the output of the last stage, on every rank; ranks wait for each other."""
        x = first
        for index in range(self.count):
            source, here = (index - 1) % self.ranks, index % self.ranks
            if here != self.rank:
                continue
            if index and source != self.rank:
                x = self._receive(source)
            x = self.stages[index](x, **every)
            if index + 1 < self.count and (index + 1) % self.ranks != self.rank:
                self._send(x, (index + 1) % self.ranks)
        return broadcast_result(x, self.group, (self.count - 1) % self.ranks, self.device)

    def _send(self, x: Tensor, to: int) -> None:
        dist.send_object_list([x.dtype, x.shape], group=self.group, device=self.device, group_dst=to)
        dist.send(x.contiguous(), group=self.group, group_dst=to)

    def _receive(self, source: int) -> Tensor:
        described: list[Any] = [None, None]
        dist.recv_object_list(described, group=self.group, device=self.device, group_src=source)
        x = torch.empty(described[1], dtype=described[0], device=self.device)
        dist.recv(x, group=self.group, group_src=source)
        return x


def _forget_trial(calls: Iterator[int], stage: Any, inputs: Any) -> None:
    """Reset the counts of tokens of the first call in training, by which torch learns shapes."""
    if stage.training and next(calls) == 1:
        stage.expert_load.zero_()


def broadcast_result(found: Any, group: dist.ProcessGroup, source: int, device: torch.device) -> Any:
    """Return what the rank `source` of the group found, with its tensors, on all ranks."""
    described = [tree_map_only(Tensor, lambda x: _Like(x.shape, x.dtype), found)]
    dist.broadcast_object_list(described, group=group, device=device, group_src=source)
    own, tensors = dist.get_rank(group) == source, iter(tree_leaves(found))

    def take(like: Any) -> Any:
        x = next(tensors) if own else None
        if not isinstance(like, _Like):
            return like
        x = torch.empty(like.shape, dtype=like.dtype, device=device) if x is None else x.contiguous()
        dist.broadcast(x, group=group, group_src=source)
        return x

    return tree_map(take, described[0])


@dataclass(frozen=True)
class _Like:
    shape: torch.Size
    dtype: torch.dtype
