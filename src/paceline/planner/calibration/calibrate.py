"""Measure this machine with 1, 2, 4, … ranks at work at the same time.

All numbers of ranks are measured in turns: whatever else runs on the machine then slows all of them alike, and their
ratios, which speed-ups depend on, stay right.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.io.format import duration, number, size
from paceline.io.table import Table
from paceline.planner.calibration.calibration import CALIBRATION_FORMAT, AcceleratorRates, RankRates, read_calibration
from paceline.runlog.machine import describe_environment
from paceline.workload import LogFn

REDUCED_BYTES = (4e3, 4e5, 4e6, 1.6e7)
ROUNDS = 3
ENOUGH_S = 0.15
"""Duration of each measurement, in each round."""
TIMEOUT_S = 300.0
ProbeRates = dict[str, float]
PRELOAD = ("paceline.planner.calibration.cpu_probes", "paceline.launch.process_group")


def calibrate_machine(ranks: Sequence[int], log: LogFn, threads: int = 0, enough_s: float = ENOUGH_S) -> dict[str, Any]:
    """Measure with each of these numbers of ranks, and return the content of a calibration file.

    `threads` per rank; 0 divides the cores among the ranks, as training does.
    """
    from paceline.launch.local import run_ranks

    cores = len(os.sched_getaffinity(0))
    plan = {n: threads or max(1, cores // n) for n in ranks}
    seconds = ROUNDS * 11 * enough_s * sum(n <= cores for n in ranks) + 10
    log(f"calibrate: {', '.join(map(str, ranks))} ranks on {cores} cores, about {seconds:.0f} s")
    counted = [n for n in plan if n <= cores] or [1]
    plan.setdefault(counted[0], threads or cores)
    each = run_ranks(_measure_rank, (plan, counted, enough_s), max(plan), PRELOAD)
    rows = [_average_ranks(n, plan[n], each, max(counted), cores) for n in sorted(plan)]
    return {**_describe_machine(), "measured": rows}


def calibrate_gpu(log: LogFn) -> dict[str, Any]:
    """Do the same for this machine's CUDA device alone."""
    from paceline.planner.calibration.gpu_probes import measure_gpu

    return {**_describe_machine(), "measured": [], "gpu": measure_gpu(log)}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _describe_machine() -> dict[str, Any]:
    import torch

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
    from paceline.planner.calibration.cpu_probes import CPU_MATMULS, product_name

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
    import torch
    import torch.distributed as dist

    from paceline.launch.environment import detect_rank
    from paceline.launch.process_group import create_subgroup, join_ranks
    from paceline.planner.calibration.cpu_probes import build_probes, measure_all_reduce_s, measure_best_s

    rank_info = detect_rank(os.environ)
    assert rank_info is not None
    rates: dict[int, ProbeRates] = {n: {} for n in counted if rank_info.rank < n}
    reduces: dict[int, list[float]] = {}
    with join_ranks(rank_info, "cpu", 1, TIMEOUT_S):
        together = dist.barrier if rank_info.world > 1 else lambda: None
        for _ in range(ROUNDS if enough_s >= ENOUGH_S else 1):
            for probe in build_probes():
                for n in counted:
                    together()
                    if rank_info.rank < n:
                        torch.set_num_threads(plan[n])
                        rate = probe.amount / measure_best_s(probe.work, enough_s)
                        rates[n][probe.name] = max(rate, rates[n].get(probe.name, 0.0))
        torch.set_num_threads(1)
        for n in sorted(plan):
            group = create_subgroup(range(n)) if n > 1 else None
            if n > 1 and rank_info.rank < n:
                repeats = 12 if enough_s >= ENOUGH_S else 3
                reduces[n] = [measure_all_reduce_s(sent, group, repeats) for sent in REDUCED_BYTES]
            together()
    return rates, reduces


def build_calibration_table(path: Path) -> Table:
    columns = ("ranks", "threads", "products", "attention", "element-wise", "update", "launch", "all-reduce")
    out, found = Table(*columns, left=0), read_calibration(path)

    def add(name: str, threads: str, row: RankRates | AcceleratorRates, all_reduce: str) -> None:
        flops = (f"{number(rate / 1e9, 3)} GF/s" for rate in (row.matmul_fit()[0], row.attention_flops_s))
        moved = (f"{size(rate)}/s" for rate in (row.moved_bytes_s, row.update_bytes_s))
        out.add_row(name, threads, *flops, *moved, f"{number(row.launch_s * 1e6, 3)} µs", all_reduce)

    for row in found.measured:
        call_s, ring_bytes_s = row.all_reduce_fit()
        all_reduce = f"{duration(call_s)} + {size(ring_bytes_s)}/s" if row.ranks > 1 else "-"
        add(str(row.ranks), str(row.threads), row, all_reduce)
    if found.gpu is not None:
        add(found.gpu.name, "-", found.gpu, "-")
    return out
