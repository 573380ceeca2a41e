"""The machines that a job asks for, as far as somebody has said so; the plan chooses the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypedDict

from paceline.errors import UserError
from paceline.hardware.catalogue import LOCAL, cluster, known
from paceline.spec import DEFAULT, RunSpec
from paceline.submitting.site_file import SiteFile
from paceline.submitting.slurm import Partition


class Asked(TypedDict, total=False):
    """What a user may ask for; what is left out comes from the site and the plan."""

    nodes: str | int
    """`2`, or `1-2` where fewer will do."""
    gpus_per_node: int
    ranks_per_node: int
    time: str
    partition: str
    account: str
    memory: str


@dataclass(frozen=True)
class Machines:
    least: int | None
    most: int | None
    per_node: int | None
    """Ranks of a node; None leaves it to the plan, as of the nodes."""
    on_gpu: bool
    cluster: str | None
    """What the plan prices, in its short form or as a file; None where nobody knows the devices."""

    @property
    def ranks(self) -> int | None:
        return None if self.most is None or self.per_node is None else self.most * self.per_node


def machines_of(spec: RunSpec, site: SiteFile, asked: Asked, partition: Partition | None) -> Machines:
    named = site.cluster or (spec.cluster if spec.cluster != LOCAL else None)
    named_gpus = (
        not cluster(named).device.synchronous if named is not None else bool(site.gpus_per_node or site.gpu_type)
    )
    device = spec.parallel.device
    on_gpu = "gpus_per_node" in asked or device == "cuda" or (device != "cpu" and named_gpus)
    there = site.gpus_per_node or (partition.gpus if partition is not None else None)
    nodes, per_node = _nodes(str(asked.get("nodes", ""))), asked_per_node(asked, there, partition)
    if per_node is None and nodes:
        per_node = (there or (cluster(named).per_node if named else 1)) if on_gpu else 1
    elif per_node is None and named is None:
        usual = (on_gpu and there) or 1
        per_node = spec.parallel.ranks if spec.origin("parallel.ranks") != DEFAULT else usual
    least, most = nodes or ((1, 1) if per_node is not None else (None, None))
    kind = site.gpu_type or (partition.gpu_type if partition is not None else "")
    return Machines(least, most, per_node, on_gpu, _priced(named, on_gpu, kind, most, per_node))


def _nodes(text: str) -> tuple[int, int] | None:
    """(the fewest, the most) that `2` or `1-2` asks for."""
    if not text:
        return None
    form = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    least, most = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--nodes {text}: this is not a number of nodes; write it as  --nodes 2,  or  --nodes 1-2")
    return least, most


def asked_per_node(asked: Asked, there: int | None, partition: Partition | None) -> int | None:
    """Ranks of a node that are asked for; `there` is how many GPUs one has, if that is known."""
    gpus, ranks = asked.get("gpus_per_node"), asked.get("ranks_per_node")
    for option, value in (("--gpus-per-node", gpus), ("--ranks-per-node", ranks)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: give 1 or more, or leave it out")
    if gpus is not None and there is not None and gpus > there:
        place = f" of partition {partition.name}" if partition is not None else ""
        use = f"use {there}, or more nodes" if there else "use another partition"
        raise UserError(f"--gpus-per-node {gpus}: a node{place} has {there or 'none'}; {use}")
    if gpus is not None and ranks is not None and ranks != gpus:
        raise UserError(
            f"--ranks-per-node {ranks}: each rank has a GPU, and --gpus-per-node is {gpus}; give one of them"
        )
    return gpus if gpus is not None else ranks


def _priced(named: str | None, on_gpu: bool, kind: str, nodes: int | None, per_node: int | None) -> str | None:
    """The cluster to plan for: the one that is named, with the machines that are asked for where it is a short form."""
    if named is not None:
        form = re.fullmatch(r"(?:\d+\s*x\s*)?\d+\s*x\s*([^@+]+.*)", named.strip(), re.IGNORECASE)
        return f"{nodes}x{per_node}x{form[1]}" if form and nodes and per_node else named
    device = known(kind) if on_gpu and kind else None
    if on_gpu and device is None:
        return None
    return f"{nodes or 1}x{per_node or 1}x{device.name if device is not None else 'CPU'}"
