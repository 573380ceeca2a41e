"""The pieces of work that a machine is measured with: products, attention, element-wise kernels, an update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from paceline.planner.calibration.calibration import CPU_LAYER
from paceline.planner.formulas.placement import DTYPE_SIZES
from paceline.planner.formulas.shape import LAUNCHES_PER_OPERATION

CPU_MATMULS = (
    (128, 128, 128),
    (512, 128, 512),
    (2048, 128, 128),
    (2048, 128, 512),
    (2048, 512, 128),
    (1024, 512, 1408),
)
"""(rows, inner, outer): sides of small layers."""
ATTENTION = (8, 4, 128, 32)
"""(samples, heads, positions, features per head)."""
LAYER = (4096, 128, 512)
"""(tokens, width, feed-forward) of the element-wise work."""
UPDATED_PARAMS = 1_500_000
STRETCH_S = 0.03
CHAIN = 20
"""Operations on next to nothing, one after another."""


@dataclass(frozen=True)
class Probe:
    """Some work, and how much of it one call does: FLOPs, bytes or launches."""

    name: str
    amount: float
    work: Callable[[], object]


def build_probes() -> list[Probe]:
    products = [build_product_probe(*sides) for sides in CPU_MATMULS]
    small = [build_update_probe([UPDATED_PARAMS]), build_launch_probe(CHAIN)]
    return [*products, _attention_probe(), _elementwise_probe(), *small, _layer_probe()]


def product_name(rows: int, inner: int, outer: int) -> str:
    return f"{rows}x{inner}x{outer}"


def build_product_probe(m: int, k: int, n: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Probe:
    """Make the three products of a layer: forward, and backward for input and weight; in FLOPs."""
    x, w, dy = (torch.randn(sides, device=device, dtype=dtype) for sides in ((m, k), (n, k), (m, n)))

    def work() -> None:
        F.linear(x, w)
        _ = dy @ w
        _ = dy.T @ x

    return Probe(product_name(m, k, n), 6.0 * m * k * n, work)


def _attention_probe() -> Probe:
    """Forward and backward, counted as 3.5 times the forward products."""
    b, h, s, d = ATTENTION
    q, k, v = (torch.randn(b, h, s, d, requires_grad=True) for _ in range(3))
    seed = torch.ones(b, h, s, d)

    def work() -> None:
        torch.autograd.backward([F.scaled_dot_product_attention(q, k, v)], [seed])

    return Probe("attention", 3.5 * 4.0 * b * h * s * s * d, work)


def _elementwise_probe() -> Probe:
    """Norm, activation and sum, forward and backward, as a layer has them; in bytes."""
    tokens, width, ffn = LAYER
    x, y = (torch.randn(tokens, width, requires_grad=True) for _ in range(2))
    h = torch.randn(tokens, ffn, requires_grad=True)
    one, zero = (torch.full((width,), value, requires_grad=True) for value in (1.0, 0.0))
    gx, gh = torch.ones(tokens, width), torch.ones(tokens, ffn)

    def work() -> None:
        total, active = F.layer_norm(x + y, (width,), one, zero), F.gelu(h)
        torch.autograd.backward([total, active], [gx, gh])

    return Probe("moved", 3 * tokens * (5.0 * width + 2.0 * ffn) * 4, work)


def build_update_probe(sizes: Sequence[int], device: str = "cpu") -> Probe:
    """AdamW with the norm that clipping needs; in bytes, as the planner counts them."""
    parameters = [torch.nn.Parameter(torch.randn(n, device=device)) for n in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    on_cuda: dict[str, Any] = {} if device == "cpu" else {"lr": torch.tensor(1e-4, device=device), "capturable": True}
    optimizer = torch.optim.AdamW(parameters, fused=True, **on_cuda)

    def work() -> None:
        torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        optimizer.step()

    return Probe("update", DTYPE_SIZES["fp32"].updated_bytes * sum(sizes), work)


def build_launch_probe(chain: int, device: str = "cpu") -> Probe:
    """Operations on next to nothing, forward and backward, in launches as the planner counts them."""
    x, seed = torch.zeros(8, device=device, requires_grad=True), torch.ones(8, device=device)

    def work() -> None:
        y = x
        for _ in range(chain):
            y = y * 1.5
        torch.autograd.backward([y], [seed])

    return Probe("launches", chain * 3 * LAUNCHES_PER_OPERATION, work)


def _layer_probe() -> Probe:
    """Run a whole encoder layer, forward and backward: its parts cost more one after another."""
    samples, heads, length, head_width = CPU_LAYER
    width = heads * head_width
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    qkv, out, up, down = (torch.randn(shape, requires_grad=True) for shape in shapes)
    one, zero = (torch.full((width,), value, requires_grad=True) for value in (1.0, 0.0))
    x, seed = torch.randn(samples * length, width, requires_grad=True), torch.ones(samples * length, width)

    def work() -> None:
        parts = F.linear(F.layer_norm(x, (width,), one, zero), qkv).view(samples, length, 3, heads, head_width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples * length, width)
        y = x + F.linear(mixed, out)
        y = y + F.linear(F.gelu(F.linear(F.layer_norm(y, (width,), one, zero), up)), down)
        torch.autograd.backward([y], [seed])

    return Probe("layer", 1.0, work)


def measure_best_s(work: Callable[[], object], enough_s: float) -> float:
    """Return the time of a call in the best of several stretches: other programs only make them longer.

    A stretch is as long as a pass of a small model. Single calls would fit between the time slices of other programs,
    and a plan from them would be too good for a machine that is not idle.
    """
    return min(time_stretches(work, enough_s, STRETCH_S, least=4))


def time_stretches(
    work: Callable[[], object], enough_s: float, stretch_s: float, least: int, wait: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the time of a call in each of `least` stretches or more, until `enough_s` have passed.

    `wait` is called before the clock is read, for work that a device does asynchronously.
    """

    def took_s(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        return time.perf_counter() - began

    took_s(1)
    calls = max(1, round(min(stretch_s, enough_s) / max(1e-7, took_s(1))))
    ends = time.perf_counter() + enough_s
    times: list[float] = []
    while len(times) < least or time.perf_counter() < ends:
        times.append(took_s(calls) / calls)
    return times


def measure_all_reduce_s(sent_bytes: float, group: dist.ProcessGroup | None, repeats: int) -> float:
    buffer = torch.ones(int(sent_bytes) // 4)
    times = []
    for _ in range(repeats):
        dist.barrier(group=group)
        began = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        times.append(time.perf_counter() - began)
        buffer.fill_(1.0)
    return sorted(times)[len(times) // 8]
