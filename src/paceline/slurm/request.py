"""Decide what a job requests: the user's options first, then the site file, then the plan."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from paceline.config import DEFAULT, RunSpec
from paceline.errors import UserError, did_you_mean
from paceline.hardware.catalogue import LOCAL, match_driver_name, parse_cluster
from paceline.io.durations import parse_hours
from paceline.io.format import duration, size
from paceline.layout import layout_of
from paceline.planner.candidates import PROCESS_BYTES
from paceline.planner.emit import TIME_MARGIN
from paceline.planner.emit_slurm import MIN_JOB_H
from paceline.planner.plan import Plan, plan
from paceline.slurm.commands import Partition
from paceline.slurm.site_file import SiteFile, check_memory


class JobOptions(TypedDict, total=False):
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
class MachineRequest:
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


def resolve_machines(spec: RunSpec, site: SiteFile, asked: JobOptions, partition: Partition | None) -> MachineRequest:
    named = site.cluster or (spec.cluster if spec.cluster != LOCAL else None)
    named_gpus = (
        not parse_cluster(named).device.synchronous if named is not None else bool(site.gpus_per_node or site.gpu_type)
    )
    device = spec.parallel.device
    on_gpu = "gpus_per_node" in asked or device == "cuda" or (device != "cpu" and named_gpus)
    there = site.gpus_per_node or (partition.gpus if partition is not None else None)
    nodes, per_node = _parse_nodes(str(asked.get("nodes", ""))), resolve_ranks_per_node(asked, there, partition)
    if per_node is None and nodes:
        per_node = (there or (parse_cluster(named).per_node if named else 1)) if on_gpu else 1
    elif per_node is None and named is None:
        usual = (on_gpu and there) or 1
        per_node = spec.parallel.ranks if spec.origin("parallel.ranks") != DEFAULT else usual
    least, most = nodes or ((1, 1) if per_node is not None else (None, None))
    kind = site.gpu_type or (partition.gpu_type if partition is not None else "")
    return MachineRequest(least, most, per_node, on_gpu, _cluster_to_price(named, on_gpu, kind, most, per_node))


def _parse_nodes(text: str) -> tuple[int, int] | None:
    """(the fewest, the most) that `2` or `1-2` asks for."""
    if not text:
        return None
    form = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    least, most = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--nodes {text}: this is not a number of nodes; write it as  --nodes 2,  or  --nodes 1-2")
    return least, most


def resolve_ranks_per_node(asked: JobOptions, there: int | None, partition: Partition | None) -> int | None:
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


def _cluster_to_price(
    named: str | None, on_gpu: bool, kind: str, nodes: int | None, per_node: int | None
) -> str | None:
    """The cluster to plan for: the one that is named, with the machines that are asked for where it is a short form."""
    if named is not None:
        form = re.fullmatch(r"(?:\d+\s*x\s*)?\d+\s*x\s*([^@+]+.*)", named.strip(), re.IGNORECASE)
        return f"{nodes}x{per_node}x{form[1]}" if form and nodes and per_node else named
    device = match_driver_name(kind) if on_gpu and kind else None
    if on_gpu and device is None:
        return None
    return f"{nodes or 1}x{per_node or 1}x{device.name if device is not None else 'CPU'}"


STARTUP_S = 30.0
"""For Python, torch and the first meeting of the ranks."""
ANYWAY_HINT = "submit it all the same with  --anyway"


@dataclass
class JobRequest:
    """A job that can be sent, and why it is as it is."""

    spec: RunSpec
    nodes: str
    per_node: int
    hours: float
    gpus: str = ""
    options: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the run: the layout on these machines."""
    usd_per_device_hour: float | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return int(self.nodes.rpartition("-")[2]) * self.per_node

    @property
    def note(self) -> str:
        chosen = self.plan.chosen if self.plan is not None else None
        planned = f", {duration(chosen.hours * 3600)} planned" if chosen is not None and chosen.hours else ""
        return (
            f"{self.spec.name}: {layout_of(self.spec).strategy} on {self.ranks} rank{'s' * (self.ranks > 1)}{planned}"
        )


def build_job_request(
    spec: RunSpec, site: SiteFile, asked: JobOptions, known_here: Mapping[str, Partition], *, anyway: bool = False
) -> JobRequest:
    """Decide what to ask for, or say why it cannot work. `known_here` is what Slurm says of its partitions."""
    partition = find_partition(asked.get("partition") or site.partition, known_here)
    machines = resolve_machines(spec, site, asked, partition)
    found = _plan_request(spec, site, machines, anyway)
    chosen = found.chosen if found is not None else None
    where = chosen.price.where.cluster if chosen is not None else None
    per_node = machines.per_node or (where.per_node if where else 1)
    most = machines.most or (where.nodes if where else 1)
    there = site.nodes or (partition.nodes if partition else None)
    if there is not None and most > there:
        raise UserError(f"--nodes {most}: there are {there} for a job here; use  --nodes {there}")
    least = 1 if site.fewer_nodes and machines.least == machines.most else machines.least or most
    overrides = found.overrides() if found is not None and chosen is not None else {}
    overrides = {**overrides, "parallel.ranks": most * per_node}
    ready = spec.replace(overrides, "paceline submit")
    layout_of(ready.replace({"parallel.ranks": least * per_node}))  # what cannot work with the fewest is said now
    made = JobRequest(
        ready, str(most) if least == most else f"{least}-{most}", per_node, 0.0, plan=found, overrides=overrides
    )
    made.usd_per_device_hour = found.rates.usd if found is not None else site.price
    ways = f"{made.nodes} node{'s' * (made.nodes != '1')} × {per_node} rank{'s' * (per_node > 1)}"
    made.reasons.append(f"{ways}: {_describe_choice(machines, asked, spec)}{_describe_layout(found)}")
    if machines.on_gpu:
        kind = site.gpu_type or (partition.gpu_type if partition else "")
        made.gpus = f"{kind}:{per_node}" if kind else str(per_node)
    elif partition is not None and partition.gpus and spec.parallel.device != "cpu":
        made.reasons.append(
            f"no GPU: none is asked for; nodes of {partition.name} have {partition.gpus} (--gpus-per-node)"
        )
    _set_time_limit(made, site, asked, partition, anyway)
    _set_options(made, site, asked, partition)
    return made


def find_partition(name: str | None, known_here: Mapping[str, Partition]) -> Partition | None:
    """The one that is asked for; None where nobody asks, or Slurm does not say which there are."""
    if name is None or not known_here:
        return None
    if name not in known_here:
        hint = did_you_mean(name, known_here)
        there = f"{' There are' if hint else '; there are'} {', '.join(known_here)}"
        raise UserError(f"--partition {name}: there is no such partition{hint}{there}")
    return known_here[name]


def _plan_request(spec: RunSpec, site: SiteFile, machines: MachineRequest, anyway: bool) -> Plan | None:
    """The plan on the machines that were asked for; None where nobody knows the devices, or it is sent anyway."""
    if machines.cluster is None:
        return None
    try:
        found = plan(spec, machines.cluster, (machines.ranks,) if machines.ranks else (), site.price)
    except UserError as error:
        if anyway:
            return None
        raise UserError(f"{error}; {ANYWAY_HINT}") from None
    if found.chosen is None and not anyway:
        raise UserError(f"the plan says that this cannot work: {' '.join(found.advice)}; {ANYWAY_HINT}")
    return found if found.chosen is not None else None


def _describe_choice(machines: MachineRequest, asked: JobOptions, spec: RunSpec) -> str:
    if asked.keys() & {"nodes", "gpus_per_node", "ranks_per_node"}:
        return "asked for"
    if machines.ranks is None:
        return "what the plan chooses"
    if spec.origin("parallel.ranks") != DEFAULT:
        return "parallel.ranks of the run"
    return "nobody asked for more" if machines.ranks == 1 else "all GPUs of a node"


def _describe_layout(found: Plan | None) -> str:
    if found is None or found.chosen is None:
        return "; there is no plan for these devices (a site file names them with  cluster: 4xA100)"
    price = found.chosen.price
    memory = f"{size(price.memory.total_bytes)} of {size(price.capacity_bytes)} per device"
    return f"; {price.layout.strategy}, {memory}, {duration(price.step_s)} per step"


def _set_time_limit(
    made: JobRequest, site: SiteFile, asked: JobOptions, partition: Partition | None, anyway: bool
) -> None:
    """The limit of one job; a run that needs more goes on in another."""
    chosen = made.plan.chosen if made.plan is not None else None
    need = None if chosen is None or chosen.hours is None else chosen.hours * TIME_MARGIN
    limits = [h for h in (site.hours, partition.hours if partition else None) if h is not None]
    limit = min(limits, default=None)
    if "time" in asked:
        made.hours, why = parse_hours(str(asked["time"]), "--time"), "asked for"
        if limit is not None and made.hours > limit:
            raise UserError(
                f"--time {asked['time']}: a job may take {duration(limit * 3600)} here; a run that needs more "
                "goes on in another job by itself, so leave --time out"
            )
    elif need is not None and chosen is not None and chosen.hours is not None:
        wanted = max(MIN_JOB_H, need)
        made.hours = min(wanted, limit or math.inf)
        why = (
            f"{duration(chosen.hours * 3600)} planned × {TIME_MARGIN:g}"
            if wanted == need
            else "the least that is asked for"
        )
        why = why if made.hours == wanted else "the limit here"
    elif limit is not None:
        made.hours, why = limit, "the limit here; the plan does not know how long the run is"
    else:
        raise UserError("how long may a job take? the plan does not know, and there is no limit; give  --time 2h")
    jobs = (
        f", in about {math.ceil(need / made.hours):,} jobs, one after the other" if need and need > made.hours else ""
    )
    made.reasons.append(f"{duration(made.hours * 3600)} for a job: {why}{jobs}")
    first_s = STARTUP_S + site.warn_s + (chosen.price.start_s + chosen.price.step_s if chosen is not None else 0.0)
    if made.hours * 3600 < first_s and not anyway:
        raise UserError(
            f"a job of {duration(made.hours * 3600)} would end before its first checkpoint: ranks need about "
            f"{duration(first_s - site.warn_s)} to start and make a step, and save {site.warn_s} s before the end; "
            f"use  --time {math.ceil(first_s / 60) + 1}m  or more, or a smaller warn_s in the site file; {ANYWAY_HINT}"
        )


def _set_options(made: JobRequest, site: SiteFile, asked: JobOptions, partition: Partition | None) -> None:
    """What else sbatch is told."""
    given: dict[str, Any] = {
        "partition": asked.get("partition") or site.partition,
        "account": asked.get("account") or site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "cpus-per-task": str(site.cpus_per_rank) if site.cpus_per_rank else None,
        "mem": check_memory(str(asked["memory"]), "--memory") if "memory" in asked else site.memory,
    }
    chosen = made.plan.chosen if made.plan is not None else None
    if given["mem"] is None and chosen is not None and not made.gpus:
        bytes_ = made.per_node * (chosen.price.memory.total_bytes * TIME_MARGIN + PROCESS_BYTES)
        most = partition.memory_mb if partition else 0
        mb = math.ceil(bytes_ / 1e6)
        given["mem"] = f"{min(mb, most) if most else mb}M"
        why = f"{size(PROCESS_BYTES)} per process, and the plan × {TIME_MARGIN:g}"
        if most and mb > most:
            why, bytes_ = f"all that a node has; {size(bytes_)} would be {why}", most * 1e6
        made.reasons.append(f"{size(bytes_)} of memory per node: {why}")
    made.options = {**{key: value for key, value in given.items() if value}, **site.options}
