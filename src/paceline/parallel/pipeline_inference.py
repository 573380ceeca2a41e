"""Pipelines of models without `stage`: what is called in which order is found by running the loss once.

Each rank calls the whole model. Modules of other stages are absent: they hold no weights, and return what was received
of them, or NaN where nothing later is computed from it. A rank leaves the model where the next stage begins.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from paceline.launch.shared_device import route_through_host
from paceline.layout import TWO_STAGE_SCHEDULES, Layout, divide_layers
from paceline.parallel.dataflow import Dataflow, run_on_fakes
from paceline.parallel.pipeline import Tie, broadcast_result, pipeline_error
from paceline.workload import Workload

Leaf = tuple[int, int]  # which call of a pass, which tensor of what it returned
CONTAINERS = nn.ModuleList | nn.ModuleDict
FORWARD, BACKWARD = True, False


@dataclass(frozen=True)
class Call:
    """A call of a part of the model, as it was seen."""

    name: str
    needs: frozenset[Leaf]
    returned: Any  # with each tensor as a `Returned`
    flops: float = 0.0


@dataclass(frozen=True)
class Returned:
    number: int
    same: int | None  # which of the given values it is
    like: int | None  # which of the given values has its shape and type


@dataclass(frozen=True)
class Cut:
    """Which calls belong to which stage, and what each stage sends to the next."""

    calls: Sequence[Call]
    stages: Sequence[int]  # of each call
    messages: Sequence[tuple[Leaf, ...]]
    parts: Mapping[str, nn.Module]
    layers: Sequence[str]
    ties: Sequence[Tie] = field(default=(), kw_only=True)
    direct: Sequence[tuple[str, str]]  # parameters of modules around layers, and those

    def words(self) -> str:
        """Describe the stages by the first and the last call in them."""
        names: dict[int, list[str]] = {}
        for call, stage in zip(self.calls, self.stages, strict=True):
            names.setdefault(stage, []).append(call.name)
        found = (" to ".join(dict.fromkeys((called[0], called[-1]))) for called in names.values())
        return f"pipeline, found by tracing: {' | '.join(found)}"

    def list_layers(self, model: nn.Module) -> list[nn.Module]:
        """Return the repeated layers that a stage of the model has."""
        found = (model.get_submodule(name) for name in self.layers)
        return [layer for layer in found if not isinstance(layer, Absent)]

    def keep_stage(self, model: nn.Module, stage: int) -> None:
        """Remove from a model all parts but those of one stage."""
        held = self.held_by(stage)
        for name, module in self.parts.items():
            if name not in held:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, Absent(module))
        aliases = {tie.held[stage]: [tie.name] for tie in self.ties if stage in tie.held}
        model.__dict__["tied_names"] = aliases  # they are not missing in `model.init_from`
        for name, holder in self.direct if stage else ():
            module, own = model.get_submodule(holder), name.rpartition(".")[2]
            whole = module._parameters.pop(own)
            assert whole is not None
            module.__dict__[own] = torch.full(whole.shape, torch.nan)

    def held_by(self, stage: int) -> set[str]:
        """Return the parts that a stage calls; what is never called belongs to the last."""
        pairs = list(zip(self.calls, self.stages, strict=True))
        called = {call.name for call, _ in pairs}
        never = set(self.parts) - called if stage == len(self.messages) else set()
        return {call.name for call, of in pairs if of == stage} | never


def infer_stages(workload: Workload, model: nn.Module, batch: Any, layout: Layout) -> Cut:
    """Cut the order of calls between layers, so that the costliest stage is cheapest."""
    if layout.schedule in TWO_STAGE_SCHEDULES:
        reason = "needs the methods inputs, costs and stage of the Workload; use parallel.schedule=1f1b"
        raise pipeline_error(layout, reason)
    names = {id(module): name for name, module in model.named_modules()}
    layers = [names[id(block)] for block in workload.blocks(model)]
    if len(layers) < layout.stages:
        advice = f"use parallel.pipeline={len(layers)}" if len(layers) > 1 else "use parallel.strategy=fsdp"
        raise pipeline_error(layout, f"the model has {len(layers)} repeated layers; {advice}")
    parts, direct = _find_parts(model, layers)
    calls, costs = _trace_calls(workload, model, batch, parts, direct), defaultdict[str, float](float)
    order = [call.name for call in calls if call.name in layers]
    if again := [name for name, times in Counter(order).items() if times > 1]:
        raise pipeline_error(layout, f"{again[0]} is called twice in a pass; use parallel.strategy=fsdp")
    upcoming = "after"
    for call in reversed(calls):
        upcoming = call.name if call.name in layers else upcoming
        costs[upcoming] += call.flops
    before = sum(call.flops for call in calls[: next(i for i, call in enumerate(calls) if call.name in layers)])
    costs[order[0]] -= before
    ranges = divide_layers([costs[name] for name in order], before, costs["after"], layout.stages)
    of_layer = {order[i]: stage for stage, places in enumerate(ranges) for i in places}
    stages, current = [0] * len(calls), layout.stages - 1
    for index in reversed(range(len(direct), len(calls))):
        stages[index] = current = of_layer.get(calls[index].name, current)
    messages = []
    for stage in range(layout.stages - 1):
        later = (call.needs for call, of in zip(calls, stages, strict=True) if of > stage)
        messages.append(tuple(sorted(leaf for leaf in frozenset().union(*later) if stages[leaf[0]] <= stage)))
    if wide := [calls[leaf[0]].name for leaves in messages for leaf in leaves if leaf[0] < len(direct)]:
        raise pipeline_error(layout, f"several stages would need {wide[0]}; move it into a module, or use fsdp")
    cut = Cut(calls, stages, messages, parts, layers, direct)
    return replace(cut, ties=_find_ties(model, cut))


def _find_parts(model: nn.Module, layers: Sequence[str]) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """Return layers and outermost other modules with parameters; parameters of modules around them."""
    parts: dict[str, nn.Module] = {}
    direct = []
    for name, module in model.named_modules():
        around = not name or any(layer.startswith(f"{name}.") for layer in layers) or isinstance(module, CONTAINERS)
        if name in layers or not around:
            inside = any(name.startswith(f"{part}.") for part in parts)
            parts |= {name: module} if not inside and next(module.parameters(), None) is not None else {}
        else:
            direct += [(f"{name}.{own}".lstrip("."), name) for own, _ in module.named_parameters(recurse=False)]
    return parts, direct


def _find_ties(model: nn.Module, cut: Cut) -> list[Tie]:
    """Find parameters that several stages hold, each by the name that it has there."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    held = [cut.held_by(stage) for stage in range(len(cut.messages) + 1)]
    ties = []
    for known in names.values():
        pairs = ((stage, name) for stage in range(len(held)) for name in reversed(known))
        own = {stage: name for stage, name in pairs if any(name.startswith(f"{part}.") for part in held[stage])}
        ties += [Tie(known[0], own)] if len(own) > 1 else []
    return ties


def _trace_calls(
    workload: Workload, model: nn.Module, batch: Any, parts: Mapping[str, nn.Module], direct: Sequence[tuple[str, str]]
) -> list[Call]:
    flow, calls, began = Dataflow(), list[Call](), list[float]()

    def begin(root: nn.Module, args: Any, kwargs: Any) -> None:
        for index, (name, holder) in enumerate(direct):
            calls.append(Call(name, frozenset(), None))
            parameter = getattr(root.get_submodule(holder), name.rpartition(".")[2])
            flow.mark(parameter, lambda *_, index=index: frozenset({(index, 0)}))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        began.append(flow.flops)

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given, index, count = tree_leaves((args, kwargs)), len(calls), iter(range(1 << 20))
        kinds = [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in given]

        def describe(x: Tensor) -> Returned:
            same = next((n for n, other in enumerate(given) if other is x), None)
            return Returned(next(count), same, kinds.index(kind) if (kind := (x.shape, x.dtype)) in kinds else None)

        returned = tree_map_only(Tensor, describe, out)
        calls.append(Call(name, flow.of(given), returned, flow.flops - began.pop()))
        for seen, leaf in zip(tree_leaves(returned), tree_leaves(out), strict=True):
            if isinstance(seen, Returned) and seen.same is None:
                flow.mark(leaf, lambda *_, number=seen.number: frozenset({(index, number)}))

    def end(root: nn.Module, args: Any, out: Any) -> None:
        calls.append(Call("the output", flow.of(out), None))

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True), model.register_forward_hook(end)]
    for name, module in parts.items():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(leave, name), with_kwargs=True))
    try:
        run_on_fakes(workload, model, batch, flow)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Absent(nn.Module):
    """Stands for a part of another stage."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.__dict__["whole"] = whole.to("meta").eval()  # its weights are not this rank's
        self.__dict__["stand_in"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["whole"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.stand_in(self.whole, args, kwargs)


class _LeftStage(Exception):
    """The next call belongs to another stage."""


class InferredPipeline(nn.Module):
    """The stage of one rank, with the interface of the whole model: `run` trains, a call evaluates."""

    def __init__(self, model: nn.Module, cut: Cut, layout: Layout, mesh: DeviceMesh, back: DeviceMesh) -> None:
        super().__init__()
        self.model, self.cut, self.ranks = model, cut, layout.pipeline
        self.rank, self.last = mesh.get_local_rank("pipeline"), mesh.get_local_rank("pipeline") == layout.pipeline - 1
        self.device = next(model.parameters()).device
        groups = (mesh["pipeline"].get_group(), back["pipeline"].get_group())
        self.ahead, self.back = (route_through_host(group, self.device) for group in groups)
        self.warm_up = layout.pipeline - 1 - self.rank if layout.schedule == "1f1b" else 1 << 30
        self.incoming = cut.messages[self.rank - 1] if self.rank else ()
        self.outgoing = () if self.last else cut.messages[self.rank]
        self.seen: Counter[str] = Counter()
        self.values: dict[Leaf, Tensor] = {}
        self.left = self.training_pass = False
        self.sent: list[tuple[Any, Tensor]] = []
        self.known: dict[Any, Any] = {}
        places: Counter[str] = Counter()
        self.place: dict[tuple[str, int], int] = {}
        for index, call in enumerate(cut.calls):
            self.place[call.name, places[call.name]] = index
            places[call.name] += 1
        for name in cut.parts:
            part = model.get_submodule(name)
            if isinstance(part, Absent):
                part.__dict__["stand_in"] = partial(self._stand_in, name)
            else:
                part.register_forward_hook(partial(self._keep_values, name))
        cast(Any, model).forward = partial(self._call_stage, model.forward)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def list_orders(self, micro_batches: int) -> Iterator[bool]:
        """Yield whether a forward or a backward pass is next."""
        ahead = min(self.warm_up, micro_batches)
        yield from [FORWARD] * ahead
        yield from [FORWARD, BACKWARD] * (micro_batches - ahead)
        yield from [BACKWARD] * ahead

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model does, on every rank; in a pass of `run` on the last alone."""
        if self.training_pass:
            found = self.model(*args, **kwargs)
            if self.left:
                raise _LeftStage
            return found
        self.begin(key := describe_tensors((args, kwargs)))
        found = self.model(*args, **kwargs)
        if self.left:
            self.send_ahead(key, found)
        self.finish()
        return broadcast_result(found if self.last else None, self.ahead, self.ranks - 1, self.device)

    def run(self, batch: Any, loss: Callable[[], Any]) -> tuple[list[Tensor], list[Tensor], Any]:
        """Run a forward pass; return (what was received, what was sent, the loss on the last rank)."""
        received, self.training_pass = self.begin(key := describe_tensors(batch)), True
        try:
            return received, [], loss()
        except _LeftStage:
            outputs = [self.values[leaf] for leaf in self.outgoing]
            self.send_ahead(key, outputs)
            return received, outputs, None
        finally:
            self.training_pass = False

    def backward(
        self, received: Sequence[Tensor], outputs: Sequence[Tensor], start: Callable[[], Tensor] | None
    ) -> Tensor | float:
        """Run a backward pass from the loss, by `start`, or from the next stage."""
        found = 0.0 if start is None else start()
        if start is None:
            trained = [x for x in outputs if x.requires_grad]
            gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in trained]
            for gradient in gradients:
                dist.recv(gradient, group=self.back, group_src=self.rank + 1)
            torch.autograd.backward(trained, gradients)
        for x in received:
            if x.requires_grad:
                self._send(torch.zeros_like(x) if x.grad is None else x.grad, self.back, self.rank - 1)
        return found

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def begin(self, key: Any) -> list[Tensor]:
        """Receive what a pass needs of other stages; a new `key` comes with shapes."""
        self.seen.clear()
        self.left, received = False, []
        if self.incoming:
            if ("in", key) not in self.known:
                described: list[Any] = [None]
                dist.recv_object_list(described, group=self.ahead, device=self.device, group_src=self.rank - 1)
                self.known["in", key] = described[0]
            for shape, dtype, trained in self.known["in", key]:
                x = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(x, group=self.ahead, group_src=self.rank - 1)
                received.append(x.requires_grad_(trained))
        self.values = dict(zip(self.incoming, received, strict=True))
        return received

    def send_ahead(self, key: Any, outputs: Sequence[Tensor]) -> None:
        if ("out", key) not in self.known:
            self.known["out", key] = [(x.shape, x.dtype, x.requires_grad) for x in outputs]
            described = [self.known["out", key]]
            dist.send_object_list(described, group=self.ahead, device=self.device, group_dst=self.rank + 1)
        for x in outputs:
            self._send(x.detach(), self.ahead, self.rank + 1)

    def _send(self, x: Tensor, group: Any, to: int) -> None:
        x = x.contiguous()
        self.sent.append((dist.isend(x, group=group, group_dst=to), x))

    def _call_stage(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model up to the end of the stage; what hooks see of it is what is sent."""
        try:
            return forward(*args, **kwargs)
        except _LeftStage:
            self.left = True
            return [self.values[leaf] for leaf in self.outgoing]

    def _count(self, name: str) -> int:
        index = self.place[name, self.seen[name]]
        self.seen[name] += 1
        return index

    def _keep_values(self, name: str, part: nn.Module, args: Any, out: Any) -> None:
        index, tensors = self._count(name), _tensors(out)
        self.values |= {leaf: tensors[leaf[1]] for leaf in self.outgoing if leaf[0] == index}

    def _stand_in(self, name: str, whole: nn.Module, args: Any, kwargs: Any) -> Any:
        index = self._count(name)
        if self.cut.stages[index] > self.rank:
            raise _LeftStage
        given, shapes = tree_leaves((args, kwargs)), list[Tensor]()

        def make(seen: Any) -> Any:
            if not isinstance(seen, Returned):
                return seen
            if seen.same is not None:
                return given[seen.same]
            if (index, seen.number) in self.values:
                return self.values[index, seen.number]
            like = None if seen.like is None else given[seen.like]
            if like is None and not shapes:  # a mask may be left out in this pass
                with torch.no_grad():
                    on_meta = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
                    shapes.extend(_tensors(whole(*on_meta[0], **on_meta[1])))
            like = shapes[seen.number] if like is None else like
            empty = torch.nan if like.is_floating_point() else 0
            return torch.full(like.shape, empty, dtype=like.dtype, device=self.device)

        return tree_map(make, self.cut.calls[index].returned)


def describe_tensors(tree: Any) -> Any:
    """Return what the shapes and types of a pass follow from."""
    leaves = tuple((tuple(x.shape), x.dtype) for x in _tensors(tree))
    return leaves, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
