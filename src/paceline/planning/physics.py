"""Every number of the planner that is not in a data sheet: few, each with its meaning and its unit.

They describe devices, links and frameworks in general; none belongs to one source, model or machine. A calibration of
the present machine replaces some of them; nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _number(value: float, unit: str, meaning: str, low: float, high: float) -> Any:
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "low": low, "high": high})


@dataclass(frozen=True)
class Physics:
    # compute
    matmul_efficiency: float = _number(0.95, "fraction", "of the best bare matrix product, sustained in training", 0.4, 1)
    half_tiles: float = _number(13.0, "tiles", "of 128 × 128 results that keep a device half busy", 1, 400)
    ragged_efficiency: float = _number(0.50, "fraction", "left where a side is no multiple of 64", 0.3, 1)
    attention_efficiency: float = _number(0.41, "fraction", "of a large matrix product, in fused attention", 0.2, 1)
    bandwidth_efficiency: float = _number(0.63, "fraction", "of the memory bandwidth, in element-wise kernels", 0.4, 1)
    fusion: float = _number(1.65, "passes", "element-wise traffic, of what it would be if perfectly fused", 0.3, 4)
    launch_s: float = _number(13e-6, "s", "host time per kernel launched", 1e-6, 5e-5)
    update_launches: float = _number(175.0, "kernels", "per layer, to scale, clip and update its tensors", 5, 500)
    # communication
    link_efficiency: float = _number(0.68, "fraction", "of the in-node link, in large collectives", 0.3, 1)
    node_efficiency: float = _number(0.95, "fraction", "of the network, in large collectives", 0.3, 1)
    link_latency_s: float = _number(2e-6, "s", "one hop of a collective inside a node", 2e-6, 5e-5)
    node_latency_s: float = _number(4e-6, "s", "one hop of a collective between nodes", 4e-6, 1e-4)
    call_s: float = _number(6e-6, "s", "start of one collective", 1e-6, 2e-4)
    overlap: float = _number(0.59, "fraction", "of communication hidden where compute runs beside it", 0, 1)
    jitter: float = _number(0.008, "fraction", "lost to the slowest rank, per doubling of the ranks", 0, 0.1)
    # memory
    context_bytes: float = _number(1.0e9, "bytes", "of the driver and the libraries on a device", 5e8, 2e9)
    communicator_bytes: float = _number(2e9, "bytes", "of buffers for each axis that communicates", 2e8, 4e9)
    fragmentation: float = _number(0.02, "fraction", "of activations, lost between allocations", 0.01, 0.5)
    bucket_bytes: float = _number(2.5e9, "bytes", "of flat buffers kept whole where only optimiser states are divided", 5e8, 4e9)


def describe() -> list[tuple[str, float, str, str]]:
    """(name, value, unit, meaning) of every number, for tables."""
    return [(f.name, float(f.default), f.metadata["unit"], f.metadata["meaning"]) for f in fields(Physics)]  # type: ignore[arg-type]
