"""Measure a CUDA device with pieces of work as training has them, in bf16, long enough to warm up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import get_first_line
from paceline.nn.attention import BLOCK, causal_attention, compute_packed_attention, pack_texts
from paceline.planner.calibration.calibrate import (
    PROBES,
    Probe,
    build_launch_probe,
    build_product_probe,
    build_update_probe,
    time_stretches,
)
from paceline.planner.calibration.calibration import GPU_LAYER, GPU_LAYER_SAMPLES
from paceline.workload import LogFn

GPU_MATMULS, ATTENTIONS, PACKED, UPDATED = PROBES["gpu"].values()
WARM_UP = 3
MOVED = 1 << 27  # elements of the tensors that bandwidth is measured with: far more than a cache holds
COPIED_BYTES = 1 << 28
CHAIN = 50
DEVICE = "cuda"
STRETCH_S = 0.05
ENOUGH_S = 0.6  # duration of each piece: clocks sink within that time, as in training


def measure_gpu(log: LogFn, enough_s: float = ENOUGH_S) -> dict[str, Any]:
    """Return what a calibration file has about the present CUDA device."""
    log(f"calibrate: {torch.cuda.get_device_name()}, about {round(19 * enough_s) + 20} s")
    values: dict[str, Any] = {
        "name": torch.cuda.get_device_name(),
        "memory_bytes": float(torch.cuda.get_device_properties(0).total_memory),
        "matmuls": [
            [*sides, _measure_rate(build_product_probe(sides, DEVICE, torch.bfloat16), enough_s, graph=True)]
            for sides in GPU_MATMULS
        ],
        "attentions": [[*sides, _measure_attention(sides, enough_s / 2)] for sides in ATTENTIONS],
        "packed": _measure_packed_rows(enough_s / 2, log),
        "moved_bytes_s": _measure_bandwidth(enough_s),
        "update_bytes_s": _measure_rate(build_update_probe(UPDATED, DEVICE), enough_s),
        "launch_s": 1 / _measure_rate(build_launch_probe(CHAIN, DEVICE), enough_s),
        "kernel_s": _measure_kernel_s(enough_s / 2),
        "pcie_bytes_s": _measure_pcie(enough_s),
    }
    values["layer_s"], values["layer_kernels"] = _measure_layer(enough_s, log)
    torch.cuda.empty_cache()
    return values


def measure_median_s(work: Callable[[], object], enough_s: float) -> float:
    """Return the time of a call in the median of several stretches, with a synchronisation after each."""
    for _ in range(WARM_UP):
        work()
    times = time_stretches(work, enough_s, STRETCH_S, least=3, wait=torch.cuda.synchronize)
    return sorted(times)[len(times) // 2]


def _draw_normal(*sides: int, grad: bool = False) -> Tensor:
    return torch.randn(sides, device=DEVICE, dtype=torch.bfloat16).requires_grad_(grad)


def _measure_rate(probe: Probe, enough_s: float, graph: bool = False) -> float:
    """Return how much is done per second; as a CUDA graph, without the host."""
    return probe.amount / measure_median_s(_record_graph(probe.run) if graph else probe.run, enough_s)


def _measure_attention(sides: Sequence[int], enough_s: float) -> float:
    """Measure seconds of causal attention, forward and backward, by the kernel that the language model takes."""
    b, h, s, d = sides
    q, k, v = (_draw_normal(b, s, h, d, grad=True) for _ in range(3))
    seed = _draw_normal(b, s, h, d)
    return measure_median_s(lambda: torch.autograd.backward([causal_attention(q, k, v)], [seed]), enough_s)


def _measure_packed_rows(enough_s: float, log: LogFn) -> list[list[float]]:
    try:
        return [[*sides, _measure_packed(sides, enough_s)] for sides in PACKED]
    except RuntimeError as error:  # older devices have no such kernel
        log(f"calibrate: no attention over texts end to end here ({get_first_line(error)[:80]})")
        return []


def _measure_packed(sides: Sequence[int], enough_s: float) -> float:
    """Measure seconds of attention over texts end to end, forward and backward, by the classifier's kernel."""
    b, h, s, d = sides
    none = np.zeros(b, np.int64)
    texts = pack_texts(np.zeros(b * s, np.int64), np.full(b, s), none, none)
    texts = replace(texts, bounds=texts.bounds.to(DEVICE), longest=BLOCK)
    q, k, v = (_draw_normal(b * s, h, d, grad=True) for _ in range(3))
    seed = _draw_normal(b * s, h, d)

    def work() -> None:
        torch.autograd.grad([compute_packed_attention(q, k, v, texts)], [q, k, v], [seed])

    return measure_median_s(_record_graph(work), enough_s)


def _measure_bandwidth(enough_s: float) -> float:
    """Measure bytes/s of a sum and an activation: two tensors read, one written; one read, one written."""
    x, y, out = _draw_normal(MOVED), _draw_normal(MOVED), _draw_normal(MOVED)

    def work() -> None:
        torch.add(x, y, out=out)
        F.silu(x)

    return 5 * 2.0 * MOVED / measure_median_s(work, enough_s)


def _measure_kernel_s(enough_s: float) -> float:
    """Time kernels of a very small layer in turn, launched as one graph: a product, a norm, an activation."""
    x, w, one = _draw_normal(2048, 128), _draw_normal(128, 128), _draw_normal(128)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = F.gelu(F.layer_norm(F.linear(y, w), (128,), one, one))

    return measure_median_s(_record_graph(chain), enough_s) / (3 * CHAIN)


def _record_graph(work: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _measure_pcie(enough_s: float) -> float:
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    return COPIED_BYTES / measure_median_s(lambda: there.copy_(host, non_blocking=True), enough_s / 2)


def _measure_layer(enough_s: float, log: LogFn) -> tuple[float, str]:
    """Measure seconds of a decoder's layer as training runs it, and whether a compiler made its kernels."""
    b, s, width, head = GPU_LAYER_SAMPLES, GPU_LAYER.context, GPU_LAYER.width, GPU_LAYER.head_dim
    ffn = GPU_LAYER.ffn
    shapes = [(3 * width, width), (width, width), (ffn, width), (ffn, width), (width, ffn)]
    weights = [(torch.randn(shape, device=DEVICE) / shape[1] ** 0.5).requires_grad_() for shape in shapes]
    ones = [torch.ones(width, device=DEVICE, requires_grad=True) for _ in range(2)]
    x, seed = _draw_normal(b, s, width, grad=True), _draw_normal(b, s, width)
    angles = torch.outer(torch.arange(s, device=DEVICE), torch.arange(head // 2, device=DEVICE) / head)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)

    def layer(x: Tensor) -> Tensor:
        qkv, out, gate, up, down = weights
        q, k, v = F.linear(F.rms_norm(x, (width,), ones[0]), qkv).unflatten(-1, (3, -1, head)).unbind(2)
        x = x + F.linear(causal_attention(rotate(q), rotate(k), v).flatten(-2), out)
        h = F.rms_norm(x, (width,), ones[1])
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    def measure_layer(layer: Callable[[Tensor], Tensor]) -> float:
        def work() -> None:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                y = layer(x)
            torch.autograd.backward([y], [seed.to(y.dtype)])
            for tensor in (x, *weights, *ones):
                tensor.grad = None

        return measure_median_s(work, enough_s)

    try:
        return measure_layer(torch.compile(layer)), "compiled"
    except Exception as error:  # a compiler can be missing in many ways
        log(f"calibrate: nothing can be compiled here ({get_first_line(error)[:80]})")
        return measure_layer(layer), "eager"
