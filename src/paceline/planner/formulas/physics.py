"""Every number of the planner that is not in a data sheet: few, each with its meaning and its unit.

They describe devices, links and frameworks in general; none belongs to one source, model or machine. A calibration of
the present machine replaces some of them; nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _number(value: float, unit: str, meaning: str, low: float, high: float) -> Any:
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "low": low, "high": high})


@dataclass(frozen=True)
class Physics:
    # compute
    matmul_efficiency: float = _number(0.93, "fraction", "of the best bare matrix product, in training", 0.8, 1)
    half_tiles: float = _number(19.0, "tiles", "of 128 × 128 results that keep a device half busy", 1, 400)
    ragged_efficiency: float = _number(0.54, "fraction", "left where a side is an odd multiple of 8", 0.3, 1)
    attention_efficiency: float = _number(0.5, "fraction", "of a large product, in fused attention", 0.2, 1)
    packed_efficiency: float = _number(0.5, "fraction", "of a large product, in attention over short texts", 0.2, 1)
    bandwidth_efficiency: float = _number(0.63, "fraction", "of the memory bandwidth, element-wise", 0.5, 1)
    fusion: float = _number(1.65, "passes", "element-wise traffic of eager kernels, of ideally fused ones", 0.8, 3)
    launch_s: float = _number(13.3e-6, "s", "host time per kernel launched", 4e-6, 2.5e-5)
    kernel_s: float = _number(3e-6, "s", "of a kernel to start and drain on the device", 1.5e-6, 6e-6)
    update_launches: float = _number(148.0, "kernels", "per layer, to scale, clip and update", 40, 400)
    # communication
    link_efficiency: float = _number(0.71, "fraction", "of the in-node link, in large collectives", 0.5, 1)
    node_efficiency: float = _number(0.81, "fraction", "of the network, in large collectives", 0.6, 0.95)
    link_latency_s: float = _number(3.6e-6, "s", "one hop of a collective inside a node", 2e-6, 5e-5)
    node_latency_s: float = _number(8.6e-6, "s", "one hop of a collective between nodes", 4e-6, 1e-4)
    call_s: float = _number(27e-6, "s", "start of one collective", 5e-6, 2e-4)
    overlap: float = _number(0.6, "fraction", "of communication hidden where compute runs beside it", 0, 1)
    jitter: float = _number(0.005, "fraction", "lost to the slowest rank, per doubling of the ranks", 0, 0.03)
    input_bytes_s: float = _number(
        2.5e9, "bytes/s", "of samples that one process reads, collates and copies", 5e8, 1e10
    )
    # memory
    context_bytes: float = _number(1.0e9, "bytes", "of the driver and the libraries on a device", 5e8, 2e9)
    communicator_bytes: float = _number(1.8e9, "bytes", "of buffers for each axis that communicates", 2e8, 4e9)
    fragmentation: float = _number(0.08, "fraction", "of activations, lost between allocations", 0.01, 0.5)
    bucket_bytes: float = _number(1.5e9, "bytes", "of flat buffers where states alone are divided", 5e8, 4e9)


CPU_PHYSICS = Physics(
    half_tiles=0.4,
    ragged_efficiency=1.0,
    bandwidth_efficiency=0.8,
    fusion=1.0,
    launch_s=1e-6,
    update_launches=0.0,
    node_efficiency=0.95,
    link_latency_s=5e-5,
    node_latency_s=1e-4,
    call_s=3e-4,
    overlap=0.0,
    context_bytes=3.5e8,  # a process with the libraries loaded
    communicator_bytes=0.0,
    bucket_bytes=0.0,
)
"""Of CPU cores and gloo: what calibrations of a few machines gave. The defaults are of GPUs and NCCL."""
