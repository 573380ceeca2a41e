"""Optimisers, and the moving average of the weights."""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.config import Train
from paceline.nn.experts import NAMES
from paceline.parallel.parameters import LocalParameters, ParameterGroups
from paceline.parallel.precision import IN_BF16
from paceline.trainer.optim.small_adam import SmallAdam


def build_optimizer(train: Train, local: LocalParameters, groups: ParameterGroups) -> torch.optim.Optimizer:
    """Build the optimiser of the run file; its learning rates are tensors."""
    device = local[0].data.device
    lrs: dict[float, Tensor] = defaultdict(lambda: torch.tensor(0.0, dtype=torch.float32, device=device))
    parts: list[Any] = [{**group, "lr": lrs[group["lr_factor"]]} for group in build_update_groups(train, local, groups)]
    lr, betas = parts[0]["lr"], (train.beta1, train.beta2)
    small = train.optimizer_state != "fp32" or train.weights != "fp32"
    match train.optimizer:
        case "adamw" | "adam" if small:
            return SmallAdam(parts, train, local)
        case "adamw" | "adam" as rule:
            kind = AdamW if rule == "adamw" else Adam
            eps = train.eps or 1e-8
            return kind(parts, lr=lr, betas=betas, eps=eps, fused=True, capturable=device.type == "cuda")
        case "sgd":
            return SGD(parts, lr=lr, momentum=train.momentum, nesterov=train.nesterov, fused=True)
        case "lars":
            return LARS(parts, {"lr": lr, "momentum": train.momentum, "eta": 0.001}, local)
        case "lamb":
            return LAMB(parts, {"lr": lr, "betas": betas, "eps": train.eps or 1e-6}, local)
        case _:
            defaults = {"lr": lr, "betas": betas, "eps": train.eps or 1e-8, "momentum": train.momentum}
            return Muon(parts, {**defaults, "half": train.precision in IN_BF16}, local)


def build_update_groups(train: Train, local: LocalParameters, groups: ParameterGroups) -> list[dict[str, Any]]:
    """Group parameters that are updated alike; vectors decay only if `train.decay` is all."""
    found: dict[tuple[str, bool, bool], list[Tensor]] = {}
    for part in local:
        vector, end = part.data.ndim < 2, train.optimizer == "muon" and part.name in groups.ends
        found.setdefault((groups.pattern(part.name), vector, end), []).append(part.data)
    made = []
    for (pattern, vectors, ends), params in sorted(found.items(), key=lambda item: item[0]):
        group = groups[pattern]
        decay = train.weight_decay if group.weight_decay is None else group.weight_decay
        made.append(
            {
                "params": params,
                "weight_decay": decay if train.decay == "all" or not vectors else 0.0,
                "lr_factor": 1.0 if group.lr is None else group.lr / train.lr,
                "adapt": not (vectors or ends),
            }
        )
    return made


def list_state_tensors(optimizer: torch.optim.Optimizer, data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what an optimiser keeps of a parameter, by name; numbers as tensors."""
    for key, value in optimizer.state[data].items() if data in optimizer.state else ():
        if value is not None:
            yield key, value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def restore_numbers(optimizer: torch.optim.Optimizer, data: Tensor, name: str, read: Mapping[str, Tensor]) -> None:
    """Restore numbers that were read from a checkpoint; tensors were read in place."""
    for key, value in list(optimizer.state[data].items()) if data in optimizer.state else ():
        if value is not None and not isinstance(value, Tensor):
            optimizer.state[data][key] = type(value)(read[f"{name}.{key}"].item())


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
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
    """An optimiser without torch's decorators, which import the compiler for seconds."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


_adam_step = inspect.unwrap(torch.optim.Adam.step)


class Adam(_WithoutCompiler, torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update; in a recorded graph on several streams, if the device has room."""
        assert closure is None, "the loop computes the loss"
        if can_spread(self):
            run_spread_step(self)
        else:
            _adam_step(self)


class AdamW(Adam, torch.optim.AdamW):
    pass


class SGD(_WithoutCompiler, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class _LayerWise(torch.optim.Optimizer):
    """Updates matrices as a whole: by a trust ratio |weight| / |update|, or as Muon."""

    kept: tuple[str, ...]

    def __init__(self, params: Any, defaults: dict[str, Any], local: LocalParameters) -> None:
        super().__init__(params, defaults)
        self.local = local

    def list_kept(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the loop computes the loss"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                for name in self.list_kept(group) if not self.state[p] else ():
                    self.state[p][name] = torch.zeros(()) if name == "step" else torch.zeros_like(p)
            if params:
                self._update(group, params)

    def _compute_trust_ratios(self, params: list[Tensor], updates: Sequence[Tensor]) -> list[Any]:
        weights, steps = self.local.norms(params, params), self.local.norms(params, updates)
        return [torch.where((w > 0) & (u > 0), w / u, 1.0) for w, u in zip(weights, steps, strict=True)]

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError


def _list_gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling for SGD with momentum (You, Gitman and Ginsburg, 2017)."""

    kept = ("momentum_buffer",)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        updates = torch._foreach_add(_list_gradients(params), params, alpha=group["weight_decay"])
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        if group["adapt"]:
            torch._foreach_mul_(updates, [r * group["eta"] for r in self._compute_trust_ratios(params, updates)])
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(params, buffers)


class LAMB(_LayerWise):
    """Layer-wise adaptive moments for large batches (You et al., 2020)."""

    kept = ("step", "exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        grads = _list_gradients(params)
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
            torch._foreach_mul_(updates, self._compute_trust_ratios(params, updates))
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(params, updates)


class Muon(LAMB):
    """Momentum made orthogonal for matrices, whole on each rank (Jordan, 2024); AdamW for the rest."""

    def list_kept(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["adapt"] else self.kept

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not group["adapt"]:
            super()._update(group, params)
            return
        for p, grad in zip(params, _list_gradients(params), strict=True):
            part, momentum = self.local.find(p), self.state[p]["momentum_buffer"]
            momentum.mul_(group["momentum"]).add_(grad)
            whole = part.gather(grad.add(momentum, alpha=group["momentum"]))
            side_by_side = part.name.rpartition(".")[2] in NAMES  # experts; filters of a convolution are rows
            matrix = whole if side_by_side else whole.flatten(1)
            made = orthogonalise(matrix.to(torch.bfloat16 if group["half"] else p.dtype)).view(whole.shape).to(p.dtype)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(part.divide(made) * (group["lr"] * 0.2 * max(matrix.shape[-2:]) ** 0.5))


def orthogonalise(x: Tensor) -> Tensor:
    """Return a matrix of the same singular vectors, its values near 1 (Newton-Schulz of degree 5)."""
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    y = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = y @ y.mT
        y = 3.4445 * y + (-4.775 * square + 2.0315 * square @ square) @ y
    return y.mT if wide is not x else y


BLOCK = 65_536
"""Numbers that torch's fused kernel gives to a block of threads."""
PIECE = 16_384
MAX_TENSORS = 36  # tensors that the kernel takes at once
STREAMS = 8
Piece = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of a parameter, its gradient and its two averages; and the number of its updates."""


def can_spread(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a graph is recorded where the kernel leaves processors idle."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not (params and params[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    blocks = sum(-(-p.numel() // BLOCK) for p in params)
    return blocks <= torch.cuda.get_device_properties(params[0].device).multi_processor_count


def run_spread_step(optimizer: Any) -> None:
    """Run the step of a fused Adam in small pieces on several CUDA streams."""
    groups = [(group, list(_split_state(optimizer, group))) for group in optimizer.param_groups]
    counts = [optimizer.state[p]["step"] for group, _ in groups for p in group["params"] if p.grad is not None]
    torch._foreach_add_(counts, 1)
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    used = 0
    for group, pieces in groups:
        for first in range(0, len(pieces), MAX_TENSORS):
            stream = streams[used % STREAMS]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                _run_kernel(optimizer, group, pieces[first : first + MAX_TENSORS])
            used += 1
    for stream in streams[:used]:
        here.wait_stream(stream)
    torch._foreach_sub_(counts, [optimizer.found_inf] * len(counts))


def _split_state(optimizer: Any, group: dict[str, Any]) -> Iterator[Piece]:
    for p in group["params"]:
        if p.grad is None:
            continue
        kept = optimizer.state[p]
        whole = (p.detach(), p.grad, kept["exp_avg"], kept["exp_avg_sq"])
        size = PIECE if all(tensor.is_contiguous() for tensor in whole) else None
        cut = [tensor.view(-1).split(size) if size else [tensor] for tensor in whole]
        yield from ((*parts, kept["step"]) for parts in zip(*cut, strict=True))


def _run_kernel(optimizer: Any, group: dict[str, Any], pieces: Sequence[Piece]) -> None:
    params, grads, averages, squares, counts = (list(column) for column in zip(*pieces, strict=True))
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
    options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    options |= {"grad_scale": optimizer.grad_scale, "found_inf": optimizer.found_inf}
    kernel(params, grads, averages, squares, [], counts, amsgrad=False, **options)


WARM_UP_STEPS = 10  # after t steps the decay is at most (1 + t) / (10 + t)


class WeightAverage:
    """A moving average of the weights that a rank updates, evaluated in their place."""

    def __init__(self, decay: float, local: LocalParameters, parts: Sequence[nn.Module]) -> None:
        self.decay, self.local, self.parts = decay, local, parts
        self.averages = [part.data.detach().clone() for part in local]
        self.share = torch.zeros((), device=self.averages[0].device)
        """Of the new weights in the next average. A tensor: a recorded step reads it."""

    def before(self, step: int) -> None:
        self.share.fill_(1 - min(self.decay, (1 + step) / (WARM_UP_STEPS + step)))

    @torch.no_grad()
    def add(self, applied: Tensor) -> None:
        """Add the weights after an update, unless it was not applied."""
        share = self.share * applied.to(self.share)
        change = torch._foreach_sub([part.data for part in self.local], self.averages)
        torch._foreach_mul_(change, share.to(self.averages[0].dtype))
        torch._foreach_add_(self.averages, change)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Swap the average into the model while entered; afterwards it has its own weights again."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        for part, average in zip(self.local, self.averages, strict=True):
            own = part.data.clone()
            part.data.copy_(average)
            average.copy_(own)
        self.local.after_update()
        for module in (module for part in self.parts for module in part.modules()):
            if hasattr(module, "reshard"):
                cast(Any, module).reshard()  # what is still gathered is of the weights before

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by every name that a weight has: two if it is used in two places."""
        pairs = zip(self.local, self.averages, strict=True)
        by_weight = {id(part.param): part.whole(average) for part, average in pairs}
        return {
            name: by_weight[id(p)]
            for part in self.parts
            for name, p in part.named_parameters(remove_duplicate=False)
            if id(p) in by_weight
        }
