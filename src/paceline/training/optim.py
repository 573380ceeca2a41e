"""Update rules: what a gradient does to the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.local_parameters import LocalParameters
from paceline.spec import Train

Norms = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
"""The norms of whole tensors, given the parameters they belong to and this rank's parts of them."""


def optimizer_of(train: Train, local: LocalParameters) -> torch.optim.Optimizer:
    """Matrices decay; biases, norms and other vectors do not. The learning rate is a tensor, set before each step."""
    tensors = [part.data for part in local]
    device = tensors[0].device
    groups: list[dict[str, Any]] = [
        {"params": [p for p in tensors if p.ndim >= 2], "weight_decay": train.weight_decay, "adapt": True},
        {"params": [p for p in tensors if p.ndim < 2], "weight_decay": 0.0, "adapt": False},
    ]
    groups = [g for g in groups if g["params"]]
    lr = torch.tensor(0.0, dtype=torch.float32, device=device)
    betas = (train.beta1, train.beta2)
    match train.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True, capturable=device.type == "cuda")
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=train.momentum, fused=True)
        case "lars":
            return LARS(groups, lr=lr, momentum=train.momentum, norms=local.norms)
        case _:
            return LAMB(groups, lr=lr, betas=betas, norms=local.norms)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for tensor in {id(group["lr"]): group["lr"] for group in optimizer.param_groups}.values():
        tensor.fill_(lr)


class _LayerWise(torch.optim.Optimizer):
    """Scales each matrix's update by a trust ratio |weight| / |update|, so that no layer moves too far."""

    def __init__(self, params: Any, defaults: dict[str, Any], norms: Norms) -> None:
        super().__init__(params, defaults)
        self.norms = norms

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "the loop computes the loss"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self._begin(p)
            if params:
                self._update(group, params)

    def _trust(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """|w| / |u| per tensor, or 1 where either is 0."""
        weights, steps = self.norms(params, params), self.norms(params, updates)
        return [torch.where((w > 0) & (u > 0), w / u, 1.0) for w, u in zip(weights, steps, strict=True)]

    def _begin(self, p: Tensor) -> None:
        raise NotImplementedError

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling for SGD with momentum (You, Gitman and Ginsburg, 2017)."""

    def __init__(self, params: Any, lr: Tensor, momentum: float, norms: Norms, eta: float = 0.001) -> None:
        defaults = {"lr": lr, "momentum": momentum, "eta": eta, "weight_decay": 0.0, "adapt": True}
        super().__init__(params, defaults, norms)

    def _begin(self, p: Tensor) -> None:
        self.state[p]["momentum_buffer"] = torch.zeros_like(p)

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

    def __init__(self, params: Any, lr: Tensor, betas: tuple[float, float], norms: Norms, eps: float = 1e-6) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "adapt": True}
        super().__init__(params, defaults, norms)

    def _begin(self, p: Tensor) -> None:
        self.state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

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
