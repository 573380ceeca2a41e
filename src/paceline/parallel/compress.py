"""Send less than the gradients: 16 bits, thin matrices, or models now and then. The answer changes."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.config import Parallel
from paceline.io.safe_yaml import load_yaml
from paceline.parallel.ddp import (
    Hook,
    SumFuture,
    average_tensors,
    broadcast_model,
    copy_parts,
    flatten_tensors,
    start_sum,
)
from paceline.parallel.precision import HALF
from paceline.runlog.timers import CollectiveTimer

# No annotations from __future__ here, as in ddp.py.

RANK = 4  # of PowerSGD: columns of the two thin matrices
MIN_SAVING = 2  # a matrix is compressed if that divides what is sent by more than this
LOCAL_MODES = ("local_sgd", "diloco")
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # as the authors of DiLoCo chose them


class GradientReduction:
    """How the gradients of the ranks become one; this one is the exact sum."""

    entry = ""  # where a checkpoint keeps its state
    own_models = False  # whether each rank updates its own model
    hook: Hook | None = None  # replaces the sum of a bucket of gradients over ranks

    def tensors(self) -> dict[str, Any]:
        return {}

    def average_models(self, step: int, now: bool) -> None:
        """Average the models over ranks if due, after every step; `now`: the model is evaluated or saved next."""

    def average_state(self, moments: Iterable[Tensor]) -> None:
        """Average over ranks what differs between them, in place, before a checkpoint."""


class HalfPrecisionReduction(GradientReduction):
    """Gradients in 16 bits, divided first: in fp16 a sum over many ranks would overflow."""

    def __init__(self, dtype: torch.dtype, timer: CollectiveTimer) -> None:
        self.dtype, self.timer, self.hook = dtype, timer, self._send

    def _send(self, state: Any, bucket: dist.GradBucket) -> SumFuture:
        exact, ranks = bucket.buffer(), dist.get_world_size()
        rounded = exact.div(ranks).to(self.dtype)
        return start_sum(rounded, self.timer, lambda summed: exact.copy_(summed).mul_(ranks))


class PowerSGD(GradientReduction):
    """Low-rank gradients (Vogels, Karimireddy and Jaggi, 2019): M ≈ P Qᵀ, of which P = M Q and Q = Mᵀ P are summed.

    The remainder is added to the next gradient. torch's hook keeps it by bucket and could not be resumed.
    """

    entry = "powersgd"

    def __init__(self, model: nn.Module, timer: CollectiveTimer) -> None:
        self.timer, self.hook = timer, self._collect
        self.names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self.kept: dict[str, Tensor] = {}  # remainders, on the scale of the sum over ranks
        self.qt: dict[str, Tensor] = {}  # Qᵀ: faster than products with the columns of Q
        self._full: list[tuple[dict[str, Tensor], Tensor, SumFuture]] = []
        draw = torch.Generator().manual_seed(0)  # the same on every rank
        for name, p in model.named_parameters():
            rows, columns = p.shape[0] if p.ndim else 1, math.prod(p.shape[1:])
            thin = min(RANK, rows, columns)
            if p.requires_grad and (rows + columns) * thin * MIN_SAVING < rows * columns:
                self.kept[name] = torch.zeros(rows, columns, dtype=p.dtype, device=p.device)
                self.qt[name] = torch.randn(thin, columns, generator=draw).to(p.device, p.dtype)

    def tensors(self) -> dict[str, Any]:
        return {"kept": self.kept, "qt": self.qt}

    def average_state(self, moments: Iterable[Tensor]) -> None:
        average_tensors(self.kept.values())

    def _collect(self, state: Any, bucket: dist.GradBucket) -> SumFuture:
        buffer = bucket.buffer()
        future: SumFuture = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        grads = {self.names[id(p)]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        self._full.append((grads, buffer, future))
        if bucket.is_last():
            full, self._full = self._full, []
            self.reduce({name: grad for grads, _, _ in full for name, grad in grads.items()})
            for _, buffer, future in full:
                future.set_result(buffer)
        return future

    @torch.no_grad()
    def reduce(self, grads: dict[str, Tensor]) -> None:
        """Replace the gradients of this rank by, nearly, their sum over ranks."""
        ranks = dist.get_world_size()
        small = [grad for name, grad in grads.items() if name not in self.kept]
        large = {name: grad.view(self.kept[name].shape) for name, grad in grads.items() if name in self.kept}
        for name, m in large.items():
            torch.add(self.kept[name], m, alpha=ranks, out=m)
        ps = {name: m @ torch.linalg.qr(self.qt[name].T).Q for name, m in large.items()}
        finite = self._sum([*small, *ps.values()])
        ps = {name: torch.linalg.qr(p).Q for name, p in ps.items()}
        qts = {name: ps[name].T @ m for name, m in large.items()}
        finite &= self._sum([*qts.values()])
        for name, m in large.items():
            if not finite:  # this step must leave no trace
                m.fill_(math.nan)
                continue
            qt = self.qt[name].copy_(qts[name]).div_(ranks)
            torch.addmm(m, ps[name], qt, alpha=-1, out=self.kept[name])
            torch.mm(ps[name], qt, out=m)

    def _sum(self, tensors: list[Tensor]) -> bool:
        """Replace tensors by their sums over ranks; return whether all are finite."""
        if not tensors:
            return True
        flat = flatten_tensors(tensors)
        with self.timer.blocking():
            dist.all_reduce(flat)
        copy_parts(flat, tensors)
        return bool(torch.isfinite(flat).all())


class LocalSGD(GradientReduction):
    """Models that train alone and are joined now and then: local SGD, or DiLoCo (2023)."""

    entry = "outer"
    lr, momentum = OUTER_LR, OUTER_MOMENTUM

    def __init__(self, model: nn.Module, every: int, timer: CollectiveTimer, outer: bool) -> None:
        self.every, self.timer = every, timer
        self.params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.own_models = dist.is_initialized()
        if self.own_models:
            broadcast_model(model)
        self.anchor = {name: p.clone() for name, p in self.params.items()} if outer else {}
        self.velocity = {name: torch.zeros_like(p) for name, p in self.anchor.items()}
        self._joined_at = -1

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"anchor": self.anchor, "velocity": self.velocity} if self.anchor else {}

    def average_models(self, step: int, now: bool) -> None:
        if step == self._joined_at or not (now or step % self.every == 0):
            return
        self._joined_at = step
        with self.timer.blocking():
            average_tensors(self.params.values())
        if self.anchor:
            self._outer_step()

    @torch.no_grad()
    def _outer_step(self) -> None:
        params, anchors, velocities = (list(d.values()) for d in (self.params, self.anchor, self.velocity))
        gradients = torch._foreach_sub(anchors, params)
        torch._foreach_mul_(velocities, self.momentum)
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(gradients, velocities, alpha=self.momentum)
        torch._foreach_add_(anchors, gradients, alpha=-self.lr)
        torch._foreach_copy_(params, anchors)

    def average_state(self, moments: Iterable[Tensor]) -> None:
        average_tensors(moments)


def build_reduction(parallel: Parallel, model: nn.Module, timer: CollectiveTimer) -> GradientReduction:
    match parallel.reduce:
        case "exact":
            return GradientReduction()
        case "powersgd":
            return PowerSGD(model, timer)
        case "local_sgd" | "diloco":
            return LocalSGD(model, parallel.local_steps, timer, outer=parallel.reduce == "diloco")
        case half:
            return HalfPrecisionReduction(HALF[half], timer)


DIFFERENCES: dict[str, Any] = load_yaml(Path(__file__).with_name("differences.yaml").read_text(encoding="utf-8"))


def describe_difference(parallel: Parallel) -> dict[str, Any] | None:
    """Return how much the answer of a mode differs; None if it does not."""
    mode = parallel.reduce
    if mode == "exact" or (parallel.ranks == 1 and mode != "diloco"):
        return None
    measured, local = dict(DIFFERENCES["modes"][mode]), mode in LOCAL_MODES
    note, task = measured.pop("note"), {name: DIFFERENCES[name] for name in ("task", "measured_by")}
    return {
        "answer_of": "plain data parallelism (parallel.reduce=exact)",
        "reduce": mode,
        "local_steps": parallel.local_steps if local else None,
        "note": note,
        "on_test_task": {**task, "local_steps": Parallel().local_steps if local else None, **measured},
    }
