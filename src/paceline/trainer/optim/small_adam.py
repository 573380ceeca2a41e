"""Adam with moments in 8 bits or bf16, and weights in bf16, rounded at random so that the mean stays.

The random numbers are a function of the seed, the update, the parameter and the place in the whole of it: the same on
any layout and after a restart.
"""

from math import ceil, gcd, prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from paceline.config import Train
from paceline.data.order import derive_key
from paceline.errors import reject_value
from paceline.nn.attention import hash32
from paceline.parallel.parameters import LocalParameter, LocalParameters, is_sharded
from paceline.parallel.precision import to_at_least_fp32

BLOCK, MOST_SPLITS = 256, 8
"""Most values that share a scale, and ranks that may divide a row without cutting through them."""
LEAST = 4096  # values of a parameter whose moments are made smaller
AT_ONCE = 1 << 24  # values that are updated at once, in fp32
TOP, BOTTOM = 448.0, 2.0**-9  # of torch.float8_e4m3fn
FP8_BITS, BF16_BITS = 20, 16  # that fp32 has more
MOMENTS = ("exp_avg", "exp_avg_sq")


class SmallAdam(torch.optim.Optimizer):
    def __init__(self, params: Any, train: Train, local: LocalParameters) -> None:
        decoupled = train.optimizer == "adamw"
        defaults = {"betas": (train.beta1, train.beta2), "eps": train.eps or 1e-8, "decoupled": decoupled}
        super().__init__(params, defaults)
        self.local, self.seed, self.kept = local, train.seed, train.optimizer_state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "the loop computes the loss"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, self.local.find(p), p, p.grad)

    def _update(self, group: dict[str, Any], part: LocalParameter, p: Tensor, grad: Tensor) -> None:
        state = self.state[p] or self._allocate(part)
        state["step"] += 1
        (beta1, beta2), lr, step = group["betas"], group["lr"], int(state["step"])
        weights, grads = (p, grad) if p.ndim else (p[None], grad[None])
        rows = max(1, AT_ONCE // max(1, prod(weights.shape[1:])))
        for begin in range(0, len(weights), rows):
            mine = slice(begin, begin + rows)
            noise = self._draw(part, weights[mine], begin, step)
            w, g = to_at_least_fp32(weights[mine]), to_at_least_fp32(grads[mine])
            first, root = (_load(state, name, mine).to(g.dtype) for name in MOMENTS)
            if group["decoupled"]:
                w = w * (1 - lr * group["weight_decay"])
            else:
                g = g + group["weight_decay"] * w
            first, second = first.lerp(g, 1 - beta1), (root * root).lerp(g * g, 1 - beta2)
            root = second.sqrt()
            w = w - lr / (1 - beta1**step) * first / (root / (1 - beta2**step) ** 0.5 + group["eps"])
            weights[mine].copy_(w if p.dtype != torch.bfloat16 else round_at_random(w, noise, BF16_BITS))
            for name, value in zip(MOMENTS, (first, root), strict=True):
                noise = hash32(noise + 1)
                _store(state, name, mine, value, noise)

    def _allocate(self, part: LocalParameter) -> dict[str, Any]:
        """Create the moments; of the second the root is kept, which needs half the range."""
        p, kind = part.data, torch.promote_types(part.data.dtype, torch.float32)
        whole = part.whole(p)
        state: dict[str, Any] = {"step": torch.zeros(())}
        flat = p.ndim > 3  # filters of a convolution
        tail, own = (prod(t.shape[1:]) if flat else t.shape[-1] if t.ndim else 1 for t in (whole, p))
        block = choose_block(tail)
        small = self.kept == "8bit" and whole.ndim > 1 and whole.numel() >= LEAST and block > 1
        if small and own % block:
            reason = f"a rank has {own} of the {tail} columns of {part.name}, which cuts through blocks of {block}"
            raise reject_value("train.optimizer_state", "8bit", f"{reason}; use bf16", "conflict")
        for name in MOMENTS:
            if small:
                shape = (len(p), own // block, *[1] * (p.ndim - 2)) if flat else (*p.shape[:-1], own // block)
                state[name] = torch.zeros_like(p, dtype=torch.uint8)
                state[f"{name}_scale"] = torch.zeros(shape, device=p.device)
            else:
                state[name] = torch.zeros_like(p, dtype=torch.bfloat16 if self.kept == "bf16" else kind)
        self.state[p] = state
        return state

    def _draw(self, part: LocalParameter, like: Tensor, begin: int, step: int) -> Tensor:
        """Return a random number for each value, by its place in the whole parameter."""
        whole: Any = part.whole(part.data)
        first = whole.__create_chunk_list__()[0].offsets if is_sharded(whole) else [0] * like.ndim
        places = torch.zeros((), dtype=torch.int32, device=like.device)
        for axis, size in enumerate(like.shape):
            start = first[axis] + begin * (axis == 0)
            along = torch.arange(size, dtype=torch.int32, device=like.device)
            places = places[..., None] * _wrap(whole.shape[axis] if whole.ndim else 1) + (along + _wrap(start))
        return hash32(hash32(places) ^ _wrap(int(derive_key(self.seed, crc32(part.name.encode()), step))))


def choose_block(tail: int) -> int:
    """Return how many values share a scale: the most that divide rows and parts."""
    part = tail // gcd(tail, MOST_SPLITS)
    return next(block for block in range(min(BLOCK, part), 0, -1) if part % block == 0)


def _wrap(number: int) -> int:
    """Return the lower 32 bits, as torch.int32 has them."""
    return (number + 2**31) % 2**32 - 2**31


def _load(state: dict[str, Any], name: str, rows: slice) -> Tensor:
    kept = state[name] if state[name].ndim else state[name][None]
    if kept.dtype != torch.uint8:
        return to_at_least_fp32(kept[rows])
    scale, codes = state[f"{name}_scale"][rows], kept[rows]
    values = codes.reshape(*_blocks(codes, scale)).view(torch.float8_e4m3fn).float()
    return (values * scale.reshape(*values.shape[:-1], 1)).view(codes.shape)


def _store(state: dict[str, Any], name: str, rows: slice, value: Tensor, noise: Tensor) -> None:
    kept = state[name] if state[name].ndim else state[name][None]
    if kept.dtype != torch.uint8:
        kept[rows].copy_(round_at_random(value, noise, BF16_BITS) if kept.dtype == torch.bfloat16 else value)
        return
    scales = state[f"{name}_scale"][rows]
    blocks = value.float().reshape(*_blocks(value, scales))
    scale = blocks.abs().amax(-1, keepdim=True) / TOP
    scaled = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)
    codes = round_at_random(scaled, noise.view(blocks.shape), FP8_BITS).clamp(-TOP, TOP)
    if name == MOMENTS[1]:  # what the update is divided by is never rounded to 0
        codes = codes.clamp(min=BOTTOM)
    scales.copy_(scale.view(scales.shape))
    kept[rows].copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8).view(value.shape))


def _blocks(values: Tensor, scales: Tensor) -> tuple[int, int]:
    return scales.numel(), ceil(values.numel() / max(1, scales.numel()))


def round_at_random(x: Tensor, noise: Tensor, bits: int) -> Tensor:
    """Return fp32 without its last bits: rounded up as often as these are large."""
    mask = (1 << bits) - 1
    return ((x.float().view(torch.int32) + (noise & mask)) & ~mask).view(torch.float32)
