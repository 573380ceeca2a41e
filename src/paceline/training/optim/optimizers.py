"""Update rules: what a gradient does to the weights."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.groups import Groups
from paceline.parallel.local_parameters import LocalParameters
from paceline.spec import Train
from paceline.training.optim.spread import spread_step, would_spread

Norms = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""The norms of whole tensors, given the parameters they belong to and this rank's parts of them."""


def optimizer_of(train: Train, local: LocalParameters, groups: Groups) -> torch.optim.Optimizer:
    """The learning rates are tensors, set before each step."""
    device = local[0].data.device
    lrs: dict[float, Tensor] = defaultdict(lambda: torch.tensor(0.0, dtype=torch.float32, device=device))
    parts: list[Any] = [{**group, "lr": lrs[group["lr_factor"]]} for group in update_groups(train, local, groups)]
    lr, betas = parts[0]["lr"], (train.beta1, train.beta2)
    match train.optimizer:
        case "adamw" | "adam" as rule:
            kind = AdamW if rule == "adamw" else Adam
            eps = train.eps or 1e-8
            return kind(parts, lr=lr, betas=betas, eps=eps, fused=True, capturable=device.type == "cuda")
        case "sgd":
            return SGD(parts, lr=lr, momentum=train.momentum, nesterov=train.nesterov, fused=True)
        case "lars":
            return LARS(parts, {"lr": lr, "momentum": train.momentum, "eta": 0.001}, local.norms)
        case _:
            return LAMB(parts, {"lr": lr, "betas": betas, "eps": train.eps or 1e-6}, local.norms)


def update_groups(train: Train, local: LocalParameters, groups: Groups) -> list[dict[str, Any]]:
    """Parameters that are updated alike. Matrices decay; biases, norms and other vectors only if `train.decay` says."""
    found: dict[tuple[str, bool], list[Tensor]] = {}
    for part in local:
        found.setdefault((groups.pattern(part.name), part.data.ndim < 2), []).append(part.data)
    made = []
    for (pattern, vectors), params in sorted(found.items(), key=lambda item: item[0]):
        group = groups[pattern]
        decay = train.weight_decay if group.weight_decay is None else group.weight_decay
        made.append(
            {
                "params": params,
                "weight_decay": decay if train.decay == "all" or not vectors else 0.0,
                "lr_factor": 1.0 if group.lr is None else group.lr / train.lr,
                "adapt": not vectors,
            }
        )
    return made


def state_tensors(optimizer: torch.optim.Optimizer, data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What an optimiser keeps of a parameter, by name; numbers as tensors."""
    for key, value in optimizer.state[data].items() if data in optimizer.state else ():
        if value is not None:
            yield key, value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def put_numbers(optimizer: torch.optim.Optimizer, data: Tensor, name: str, read: Mapping[str, Tensor]) -> None:
    """Take over numbers that were read from a checkpoint; tensors were read where they are."""
    for key, value in list(optimizer.state[data].items()) if data in optimizer.state else ():
        if value is not None and not isinstance(value, Tensor):
            optimizer.state[data][key] = type(value)(read[f"{name}.{key}"].item())


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of all groups, each by its factor."""
    filled: set[int] = set()  # groups of one factor share a tensor
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = lr * group["lr_factor"]
        elif id(group["lr"]) not in filled:
            filled.add(id(group["lr"]))
            if group.get("lr_now") != lr * group["lr_factor"]:
                group["lr_now"] = lr * group["lr_factor"]
                group["lr"].fill_(group["lr_now"])


class _WithoutCompiler(torch.optim.Optimizer):
    """An optimiser of torch as it is below its decorators, which import the compiler to keep it away: that would take
    longer than many a run."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


_adam_step = inspect.unwrap(torch.optim.Adam.step)


class Adam(_WithoutCompiler, torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "the loop computes the loss"
        if would_spread(self):
            spread_step(self)
        else:
            _adam_step(self)


class AdamW(Adam, torch.optim.AdamW):
    pass


class SGD(_WithoutCompiler, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class _LayerWise(torch.optim.Optimizer):
    """Scales each matrix's update by a trust ratio |weight| / |update|, so that no layer moves too far."""

    kept: tuple[str, ...]
    """What is remembered of each parameter."""

    def __init__(self, params: Any, defaults: dict[str, Any], norms: Norms) -> None:
        super().__init__(params, defaults)
        self.norms = norms

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "the loop computes the loss"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                for name in self.kept if not self.state[p] else ():
                    self.state[p][name] = torch.zeros(()) if name == "step" else torch.zeros_like(p)
            if params:
                self._update(group, params)

    def _trust(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """|w| / |u| per tensor, or 1 where either is 0."""
        weights, steps = self.norms(params, params), self.norms(params, updates)
        return [torch.where((w > 0) & (u > 0), w / u, 1.0) for w, u in zip(weights, steps, strict=True)]

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling for SGD with momentum (You, Gitman and Ginsburg, 2017)."""

    kept = ("momentum_buffer",)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        updates = torch._foreach_add([p.grad for p in params], params, alpha=group["weight_decay"])
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        if group["adapt"]:
            torch._foreach_mul_(updates, [r * group["eta"] for r in self._trust(params, updates)])
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(params, buffers)


class LAMB(_LayerWise):
    """Layer-wise adaptive moments for large batches (You et al., 2020)."""

    kept = ("step", "exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        grads = [p.grad for p in params]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        for p in params:
            self.state[p]["step"] += 1
        step = self.state[params[0]]["step"].item()
        roots = torch._foreach_sqrt(torch._foreach_div(second, 1 - beta2**step))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(first, 1 - beta1**step), roots)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(updates, self._trust(params, updates))
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(params, updates)
