"""Time that host memory costs: shards over the bus, and an update by the host's cores."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.hardware.catalogue import Cluster
from paceline.planning.formulas.physics import Physics
from paceline.planning.formulas.spread import Numbers, Spread

HOST_BYTES_S = 100e9
"""Memory bandwidth of a host that its devices share, as an update by its cores reaches it."""


@dataclass(frozen=True)
class Offload:
    """Per pass over the bus, and once a step in the host."""

    bus_s: float = 0.0
    update_s: float = 0.0


def offload(owned: float, spread: Spread, cluster: Cluster, numbers: Numbers, physics: Physics) -> Offload:
    """`owned` parameters of one device: gradients go down after each pass, weights come up before they are needed.

    Where shards of the weights live in the host too, they come up twice a pass: forward and backward.
    """
    if not spread.offload:
        return Offload()
    bus = cluster.device.pcie_bytes_s * physics.link_efficiency
    ups = 2 * numbers.weight_bytes if spread.offload_weights else numbers.weight_bytes / spread.accumulate
    touched = owned * (2 * (numbers.weight_bytes + numbers.state_bytes) + 3 * numbers.gradient_bytes)
    return Offload(owned * (ups + numbers.sent_bytes) / bus, touched / (HOST_BYTES_S / cluster.per_node))
