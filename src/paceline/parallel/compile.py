"""Compile a model: layers of equal structure one by one, which share one compilation, or all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.workload import LogFn, ignore_log

MIN_EQUAL = 2  # layers of one structure, to be compiled one by one
RECOMPILE_LIMIT = 64  # shapes and kinds of layers; torch counts those of all modules together
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(eq=False)
class Compilation:
    """What is compiled of a model, until torch's compiler fails on a part: then all runs as written."""

    notice: LogFn = ignore_log
    active: bool = True
    paused: bool = False
    only_training: bool = True
    """Run evaluations as written: each of their shapes would take seconds to compile."""
    in_one_graph: bool = True  # reject what would cut a graph in two

    def wrap(self, call: Callable[..., Any], dynamic: bool | None, **options: Any) -> Callable[..., Any]:
        """Return the function compiled, or as it is while this is not active."""
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch._functorch import config as autograd_config

        if hasattr(autograd_config, "force_non_lazy_backward_lowering"):
            autograd_config.force_non_lazy_backward_lowering = True  # a failure is met here, not in the backward pass
        config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)

        def traced(*args: Any, **kwargs: Any) -> Any:  # else torch's own modules are not traced
            return call(*args, **kwargs)

        compiled = torch.compile(traced, dynamic=dynamic, fullgraph=self.in_one_graph, **options)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.active and not self.paused and (torch.is_grad_enabled() or not self.only_training):
                try:
                    return compiled(*args, **kwargs)
                except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                    self.active = False
                    self.notice(f"the model is not compiled after all: {describe_compiler_error(error)}")
            return call(*args, **kwargs)

        return run


def compile_layers(
    layers: Sequence[nn.Module], compilation: Compilation, dynamic: bool | None, forward_only: bool
) -> None:
    """Compile each layer; `forward_only`: hooks, such as those that gather a layer, stay outside, where they cost
    nothing. Otherwise a copy of the model computes with its own weights, and is not compiled."""
    for layer in layers:
        if forward_only:
            layer.forward = compilation.wrap(layer.forward, dynamic)
        else:
            layer._compiled_call_impl = compilation.wrap(layer._call_impl, dynamic)


def find_equal_layers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost layers that repeat in the lists of a model, and those of the same classes beside them.

    `MIN_EQUAL` layers of one structure count. Layers with convolutions do not: compiled together they keep one memory
    format.
    """
    found: list[nn.Module] = []
    for module in (module for module in model.modules() if isinstance(module, CONTAINERS)):
        members = [member for member in module.children() if any(member.children())]
        often = Counter(map(describe_structure, members))
        kinds = {type(member) for member in members if often[describe_structure(member)] >= MIN_EQUAL}
        plain = (m for m in members if not any(isinstance(part, CONVOLUTIONS) for part in m.modules()))
        found += [member for member in plain if type(member) in kinds]
    inside = {id(inner) for layer in found for inner in layer.modules() if inner is not layer}
    return [layer for layer in found if id(layer) not in inside]


def describe_structure(module: nn.Module) -> tuple[Any, ...]:
    """Return what two modules have in common if one compilation serves both."""
    parts = tuple((name, type(part), part.extra_repr()) for name, part in module.named_modules())
    return parts, tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())


def share_compiled(layers: Sequence[nn.Module]) -> float:
    """Return how much of the layers is compiled."""
    return len(set(map(describe_structure, layers))) / len(layers) if layers else 1.0


def describe_compiler_error(error: BaseException) -> str:
    """Return what torch's compiler could not do, and the line of the model where."""
    frames = getattr(error, "real_stack", None) or ()
    text = str(getattr(error, "inner_exception", error))
    reason = next(filter(None, map(str.strip, text.splitlines())), type(error).__name__)
    if not frames:
        return reason
    frame = frames[-1]
    return f"{reason} ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
