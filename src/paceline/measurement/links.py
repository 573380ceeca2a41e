"""Measure links: time collectives by size, and derive latency and bandwidth.

    all_reduce   2 (n - 1)/n · bytes cross each link    (a ring)
    all_gather     (n - 1)/n · bytes                    (bytes of the gathered whole)
    broadcast                  bytes

Under torchrun, srun or mpirun the existing ranks are used, and every pair of hosts is measured as well.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from paceline.io.format import number
from paceline.launch.environment import detect_rank

FORMAT = 1
SIZES_BYTES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
COLLECTIVES = ("all_reduce", "all_gather", "broadcast")
ALL_RANKS = "all ranks"
TIMEOUT_S = 300.0
ENOUGH_S = 0.4  # of one size, at least three times
MOST_TIMES = 50
LONG_S = 4.0  # larger sizes are left out


@dataclass(frozen=True)
class Link:
    collective: str
    between: str
    ranks: int
    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    latency_s: float
    bandwidth_bits_s: float  # slope between the largest sizes

    @property
    def name(self) -> str:
        return self.collective.replace("_", "-")

    @property
    def of_all_ranks(self) -> bool:
        return self.between == ALL_RANKS

    @property
    def rate(self) -> str:
        return f"{number(self.bandwidth_bits_s / 1e9, 3)} Gbit/s"


def measure_links(ranks: int = 2) -> list[Link]:
    if detect_rank(os.environ) is not None:
        return time_collectives(SIZES_BYTES)
    from paceline.launch.local import run_ranks

    return run_ranks(time_collectives, (SIZES_BYTES,), ranks)[0]


def compute_link_factor(collective: str, ranks: int) -> float:
    return {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": (ranks - 1) / ranks, "broadcast": 1.0}[collective]


def time_collectives(sizes_bytes: tuple[int, ...]) -> list[Link]:
    import torch
    import torch.distributed as dist

    from paceline.launch.process_group import create_subgroup, join_ranks

    place = detect_rank(os.environ)
    assert place is not None
    kind: Any = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= place.world else "cpu"
    with join_ranks(place, kind, 1, TIMEOUT_S) as device:
        found = [_measure_collective(name, ALL_RANKS, sizes_bytes, None, device) for name in COLLECTIVES]
        for pair, members in _list_host_pairs(place.world):
            group = create_subgroup(members)
            shared: list[Any] = [None]
            if place.rank in members:
                shared = [_measure_collective("all_reduce", pair, sizes_bytes, group, device)]
            dist.broadcast_object_list(shared, members[0])  # rank 0 writes all of them
            found += shared
    return found


def _list_host_pairs(world: int) -> list[tuple[str, tuple[int, int]]]:
    import torch.distributed as dist

    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, socket.gethostname())
    first = {host: hosts.index(host) for host in hosts}
    pairs = combinations(first, 2) if len(first) > 2 else ()
    return [(f"{a} and {b}", (first[a], first[b])) for a, b in pairs]


def _measure_collective(name: str, between: str, sizes_bytes: Sequence[int], group: Any, device: Any) -> Link:
    import torch.distributed as dist

    ranks, took = dist.get_world_size(group), dict[int, float]()
    for size in sizes_bytes:
        took[size] = _time_median(_build_collective(name, size, group, device), group, device)
        if took[size] * 4 > LONG_S:  # as all ranks know: the median is that of the slowest
            break
    sizes, seconds = tuple(took), tuple(took.values())
    return Link(name, between, ranks, sizes, seconds, min(seconds[:2]), _compute_bandwidth(name, ranks, sizes, seconds))


def _build_collective(name: str, size: int, group: Any, device: Any) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    whole = torch.zeros(max(ranks, size // 4 // ranks * ranks), device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_gather":
        parts = list(whole.chunk(ranks))
        own = parts[dist.get_rank(group)].clone()
        return lambda: dist.all_gather(parts, own, group=group)
    return lambda: dist.broadcast(whole, group=group, group_src=0)


def _time_median(work: Callable[[], object], group: Any, device: Any) -> float:
    import torch
    import torch.distributed as dist

    def time_runs(times: int) -> Any:
        """Return the seconds of the slowest rank in each of so many runs."""
        taken = torch.zeros(times, dtype=torch.float64)
        for run in range(times):
            dist.barrier(group=group)
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken[run] = time.perf_counter() - began
        taken = taken.to(device)
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
        return taken

    first_s = max(time_runs(2).max().item(), 1e-6)
    return float(time_runs(min(MOST_TIMES, max(3, int(ENOUGH_S / first_s)))).median())


def _compute_bandwidth(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope between the largest size and one of about a quarter of it, without latency and bursts."""
    last = len(sizes) - 1
    before = max((i for i in range(last) if sizes[i] <= sizes[last] / 4), default=0)
    slope = (seconds[last] - seconds[before]) / (sizes[last] - sizes[before]) if last else 0.0
    return 8 * compute_link_factor(name, ranks) / (slope if slope > 0 else seconds[last] / sizes[last])


def dump_links(links: Sequence[Link]) -> dict[str, Any]:
    return {"format": FORMAT, "links": [asdict(link) for link in links]}
