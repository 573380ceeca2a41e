"""Measure this machine with 1, 2, 4, … ranks at work at the same time.

All numbers of ranks are measured in turns: whatever else runs on the machine then slows all of them alike, and their
ratios, which speed-ups depend on, stay right.
"""

import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from paceline.io.safe_yaml import load_yaml
from paceline.launch.environment import detect_rank
from paceline.launch.local import run_ranks
from paceline.launch.process_group import create_subgroup, join_ranks
from paceline.planner.calibration.calibration import CALIBRATION_FORMAT, CPU_LAYER
from paceline.planner.formulas.placement import DTYPE_SIZES
from paceline.planner.formulas.shape import LAUNCHES_PER_OPERATION
from paceline.runlog.machine import MachineLoad, describe_environment
from paceline.workload import LogFn

REDUCED_BYTES = (4e3, 4e5, 4e6, 1.6e7)
ROUNDS = 3
ENOUGH_S = 0.15  # duration of each measurement, in each round
TIMEOUT_S = 300.0
ProbeRates = dict[str, float]
PRELOAD = ("paceline.planner.calibration.calibrate", "paceline.launch.process_group")
PROBES: dict[str, dict[str, Any]] = load_yaml(Path(__file__).with_name("probes.yaml").read_text(encoding="utf-8"))
CPU_MATMULS = PROBES["cpu"]["matmuls"]
ATTENTION = (8, 4, 128, 32)  # (samples, heads, positions, features per head)
LAYER = (4096, 128, 512)  # (tokens, width, feed-forward) of the element-wise work
UPDATED_PARAMS = 1_500_000
STRETCH_S = 0.03
"""As long as a pass of a small model: single calls would fit between the time slices of other programs, and a plan from
them would be too good for a machine that is not idle."""
CHAIN = 20  # operations on next to nothing, one after another


def calibrate_machine(ranks: Sequence[int], log: LogFn, threads: int = 0, enough_s: float = ENOUGH_S) -> dict[str, Any]:
    """Measure with each of these numbers of ranks, and return the content of a calibration file.

    `threads` per rank; 0 divides the cores among the ranks, as training does.
    """
    cores = len(os.sched_getaffinity(0))
    plan = {n: threads or max(1, cores // n) for n in ranks}
    seconds = ROUNDS * 11 * enough_s * sum(n <= cores for n in ranks) + 10
    log(f"calibrate: {', '.join(map(str, ranks))} ranks on {cores} cores, about {seconds:.0f} s")
    if (load := MachineLoad(cores, os.getloadavg()[0])).busy:
        log(f"this machine is busy: {load}, so plans will be off; calibrate again when it is idle")
    counted = [n for n in plan if n <= cores] or [1]
    plan.setdefault(counted[0], threads or cores)
    each = run_ranks(_measure_rank, (plan, counted, enough_s), max(plan), PRELOAD)
    rows = [_average_ranks(n, plan[n], each, max(counted), cores) for n in sorted(plan)]
    return {**describe_machine(), "measured": rows}


def describe_machine() -> dict[str, Any]:
    """Return what a calibration file has of the machine itself."""
    here = describe_environment()
    return {
        "format": CALIBRATION_FORMAT,
        **{name: here[name] for name in ("host", "cpu", "cores")},
        "memory_bytes": float(here["memory_bytes"]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
    }


def _average_ranks(
    n: int, threads: int, each: list[tuple[dict[int, ProbeRates], dict[int, Any]]], most: int, cores: int
) -> Any:
    """Average over ranks: a step waits for the slowest, but which one that is changes from step to step.

    More ranks than cores take turns: each has its share of what as many ranks as cores reached.
    """
    source, crowd = (n, 1.0) if n <= most else (most, n / cores)
    ranks = [own[source] for own, _ in each[:source]]
    rates = {name: sum(r[name] for r in ranks) / len(ranks) / crowd for name in ranks[0]}
    reduces = [own[n] for _, own in each[:n]] if n > 1 else []
    return {
        "ranks": n,
        "threads": threads,
        "matmuls": [[*sides, rates[product_name(*sides)]] for sides in CPU_MATMULS],
        "attention_flops_s": rates["attention"],
        "moved_bytes_s": rates["moved"],
        "update_bytes_s": rates["update"],
        "launch_s": 1 / rates["launches"],
        "layer_s": 1 / rates["layer"],
        "all_reduces": [[sent, max(own[k] for own in reduces)] for k, sent in enumerate(REDUCED_BYTES) if reduces],
    }


def _measure_rank(
    plan: dict[int, int], counted: list[int], enough_s: float
) -> tuple[dict[int, ProbeRates], dict[int, Any]]:
    """Measure rates by number of ranks at work, and seconds of all-reduces by their size."""
    rank_info = detect_rank(os.environ)
    assert rank_info is not None
    rates: dict[int, ProbeRates] = {n: {} for n in counted if rank_info.rank < n}
    reduces: dict[int, list[float]] = {}
    with join_ranks(rank_info, "cpu", 1, TIMEOUT_S):
        together = dist.barrier if rank_info.world > 1 else lambda: None
        for _ in range(ROUNDS if enough_s >= ENOUGH_S else 1):
            products = [build_product_probe(sides) for sides in CPU_MATMULS]
            small = [build_update_probe([UPDATED_PARAMS]), build_launch_probe(CHAIN)]
            for probe in [*products, _attention_probe(), _elementwise_probe(), *small, _layer_probe()]:
                for n in counted:
                    together()
                    if rank_info.rank < n:
                        torch.set_num_threads(plan[n])
                        # the best of several stretches: other programs only make them longer
                        rate = probe.amount / min(time_stretches(probe.run, enough_s, STRETCH_S, least=4))
                        rates[n][probe.name] = max(rate, rates[n].get(probe.name, 0.0))
        torch.set_num_threads(1)
        for n in sorted(plan):
            group = create_subgroup(range(n)) if n > 1 else None
            if n > 1 and rank_info.rank < n:
                repeats = 12 if enough_s >= ENOUGH_S else 3
                reduces[n] = [measure_all_reduce_s(sent, group, repeats) for sent in REDUCED_BYTES]
            together()
    return rates, reduces


@dataclass(frozen=True)
class Probe:
    """Some work, and how much of it one call does: FLOPs, bytes or launches."""

    name: str
    amount: float
    run: Callable[[], object]


def product_name(rows: int, inner: int, outer: int) -> str:
    return f"{rows}x{inner}x{outer}"


def build_product_probe(sides: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.float32) -> Probe:
    """Return a probe of the three products of a layer, with their FLOPs: forward, and backward for input and weight."""
    m, k, n = sides
    x, w, dy = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))

    def run_product() -> None:
        F.linear(x, w)
        _ = dy @ w
        _ = dy.T @ x

    return Probe(product_name(m, k, n), 6.0 * m * k * n, run_product)


def _attention_probe() -> Probe:
    """Forward and backward, counted as 3.5 times the forward products."""
    b, h, s, d = ATTENTION
    q, k, v = (torch.randn(b, h, s, d, requires_grad=True) for _ in range(3))
    seed = torch.ones(b, h, s, d)

    def run_attention() -> None:
        torch.autograd.backward([F.scaled_dot_product_attention(q, k, v)], [seed])

    return Probe("attention", 3.5 * 4.0 * b * h * s * s * d, run_attention)


def _elementwise_probe() -> Probe:
    """Build a probe of norm, activation and sum, forward and backward, as a layer has them; in bytes."""
    tokens, width, ffn = LAYER
    x, y = (torch.randn(tokens, width, requires_grad=True) for _ in range(2))
    h = torch.randn(tokens, ffn, requires_grad=True)
    one, zero = (torch.full((width,), value, requires_grad=True) for value in (1.0, 0.0))
    gx, gh = torch.ones(tokens, width), torch.ones(tokens, ffn)

    def run_elementwise() -> None:
        total, active = F.layer_norm(x + y, (width,), one, zero), F.gelu(h)
        torch.autograd.backward([total, active], [gx, gh])

    return Probe("moved", 3 * tokens * (5.0 * width + 2.0 * ffn) * 4, run_elementwise)


def build_update_probe(sizes: Sequence[int], device: str = "cpu") -> Probe:
    """Build a probe of AdamW with the norm that clipping needs; in bytes, as the planner counts them."""
    parameters = [torch.nn.Parameter(torch.randn(n, device=device)) for n in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    on_cuda: dict[str, Any] = {} if device == "cpu" else {"lr": torch.tensor(1e-4, device=device), "capturable": True}
    optimizer = torch.optim.AdamW(parameters, fused=True, **on_cuda)

    def run_update() -> None:
        torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        optimizer.step()

    return Probe("update", DTYPE_SIZES["fp32"].updated_bytes * sum(sizes), run_update)


def build_launch_probe(chain: int, device: str = "cpu") -> Probe:
    """Build a probe of operations on next to nothing, in launches as the planner counts them."""
    x, seed = torch.zeros(8, device=device, requires_grad=True), torch.ones(8, device=device)

    def run_launch() -> None:
        y = x
        for _ in range(chain):
            y = y * 1.5
        torch.autograd.backward([y], [seed])

    return Probe("launches", chain * 3 * LAUNCHES_PER_OPERATION, run_launch)


def _layer_probe() -> Probe:
    """Run a whole encoder layer, forward and backward: its parts cost more one after another."""
    samples, heads, length, head_width = CPU_LAYER
    width = heads * head_width
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    qkv, out, up, down = (torch.randn(shape, requires_grad=True) for shape in shapes)
    one, zero = (torch.full((width,), value, requires_grad=True) for value in (1.0, 0.0))
    x, seed = torch.randn(samples * length, width, requires_grad=True), torch.ones(samples * length, width)

    def run_layer() -> None:
        parts = F.linear(F.layer_norm(x, (width,), one, zero), qkv).view(samples, length, 3, heads, head_width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples * length, width)
        y = x + F.linear(mixed, out)
        y = y + F.linear(F.gelu(F.linear(F.layer_norm(y, (width,), one, zero), up)), down)
        torch.autograd.backward([y], [seed])

    return Probe("layer", 1.0, run_layer)


def time_stretches(
    work: Callable[[], object], enough_s: float, stretch_s: float, least: int, wait: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the time of a call in each of `least` stretches (0 s: one call) or more, until `enough_s` have passed.

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
