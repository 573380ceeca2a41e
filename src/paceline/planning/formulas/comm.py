"""Time of collectives: latency per hop and bytes over bandwidth, inside a node and between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.hardware.catalogue import Cluster
from paceline.planning.formulas.physics import Physics


@dataclass(frozen=True)
class Group:
    """Devices that take part in one collective: how many in each node, on how many nodes, and what they share."""

    size: int
    in_node: int
    nodes: int
    bytes_s: float
    """Bandwidth of a ring through the group: the slowest link on its way."""
    hop_s: float
    """Mean latency of one hop of a ring."""
    tree_s: float
    """Latency from a leaf to the root of a tree."""


def group(size: int, stride: int, cluster: Cluster, physics: Physics) -> Group:
    """`size` devices that stand `stride` apart in the order of the cluster."""
    per_node = cluster.per_node
    in_node = max(1, min(size, per_node // stride)) if stride < per_node else 1
    nodes = math.ceil(size / in_node)
    link = cluster.link_bytes_s * physics.link_efficiency
    if nodes == 1:
        hops = physics.link_latency_s
        return Group(size, in_node, 1, link, hops, math.log2(max(size, 2)) * hops)
    # groups that cross the same network share it: every device has its part of the node's bandwidth
    network = cluster.node_bytes_s * physics.node_efficiency * in_node / per_node
    slowest = min(link, network) if in_node > 1 else network
    hop = (physics.link_latency_s * (in_node - 1) + physics.node_latency_s) / in_node
    tree = math.log2(nodes) * physics.node_latency_s + (in_node - 1) * physics.link_latency_s
    return Group(size, in_node, nodes, slowest, hop, tree)


def all_reduce_s(sent_bytes: float, members: Group, physics: Physics, calls: float = 1) -> float:
    """2(N−1)/N · bytes/bandwidth, and the latency of a ring or of a tree, whichever is less."""
    n = members.size
    if n == 1:
        return 0.0
    latency = min(2 * (n - 1) * members.hop_s, 2 * members.tree_s)
    return calls * (physics.call_s + latency) + 2 * (n - 1) / n * sent_bytes / members.bytes_s


def all_gather_s(whole_bytes: float, members: Group, physics: Physics, calls: float = 1) -> float:
    """(N−1)/N · bytes/bandwidth around a ring; a reduce-scatter costs the same."""
    n = members.size
    if n == 1:
        return 0.0
    return calls * (physics.call_s + (n - 1) * members.hop_s) + (n - 1) / n * whole_bytes / members.bytes_s


def send_s(sent_bytes: float, stride: int, cluster: Cluster, physics: Physics) -> float:
    """One message to a neighbour `stride` devices away."""
    if stride < cluster.per_node:
        return physics.link_latency_s + sent_bytes / (cluster.link_bytes_s * physics.link_efficiency)
    share = cluster.node_bytes_s * physics.node_efficiency / cluster.per_node
    return physics.node_latency_s + sent_bytes / share


def exposed_s(comm_s: float, compute_s: float, physics: Physics, overlap: bool = True) -> float:
    """What remains visible of communication that may run beside that much compute."""
    if not overlap:
        return comm_s
    return comm_s - physics.overlap * min(comm_s, compute_s)
