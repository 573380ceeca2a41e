"""What a job asks for: the user's words first, then the site's, then what the plan says; each with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import UserError, did_you_mean
from paceline.layout import layout_of
from paceline.planning.candidates import PROCESS_BYTES
from paceline.planning.emit import SPARE
from paceline.planning.emit_slurm import SHORTEST_H
from paceline.planning.plan import Plan, plan
from paceline.record.units import duration, size
from paceline.spec import DEFAULT, RunSpec
from paceline.submitting.durations import hours_of
from paceline.submitting.machines import Asked, Machines, machines_of
from paceline.submitting.site_file import SiteFile, memory_of
from paceline.submitting.slurm import Partition

START_S = 30.0
"""For Python, torch and the first meeting of the ranks."""
ANYWAY = "submit it all the same with  --anyway"


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


def request_of(
    spec: RunSpec, site: SiteFile, asked: Asked, known_here: Mapping[str, Partition], *, anyway: bool = False
) -> JobRequest:
    """Decide what to ask for, or say why it cannot work. `known_here` is what Slurm says of its partitions."""
    partition = partition_of(asked.get("partition") or site.partition, known_here)
    machines = machines_of(spec, site, asked, partition)
    found = _planned(spec, site, machines, anyway)
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
    made.usd_per_device_hour = found.usd_per_device_hour if found is not None else site.price
    ways = f"{made.nodes} node{'s' * (made.nodes != '1')} × {per_node} rank{'s' * (per_node > 1)}"
    made.reasons.append(f"{ways}: {_who_chose(machines, asked, spec)}{_layout_words(found)}")
    if machines.on_gpu:
        kind = site.gpu_type or (partition.gpu_type if partition else "")
        made.gpus = f"{kind}:{per_node}" if kind else str(per_node)
    elif partition is not None and partition.gpus and spec.parallel.device != "cpu":
        made.reasons.append(
            f"no GPU: none is asked for; nodes of {partition.name} have {partition.gpus} (--gpus-per-node)"
        )
    _set_time(made, site, asked, partition, anyway)
    _set_options(made, site, asked, partition)
    return made


def partition_of(name: str | None, known_here: Mapping[str, Partition]) -> Partition | None:
    """The one that is asked for; None where nobody asks, or Slurm does not say which there are."""
    if name is None or not known_here:
        return None
    if name not in known_here:
        hint = did_you_mean(name, known_here)
        there = f"{' There are' if hint else '; there are'} {', '.join(known_here)}"
        raise UserError(f"--partition {name}: there is no such partition{hint}{there}")
    return known_here[name]


def _planned(spec: RunSpec, site: SiteFile, machines: Machines, anyway: bool) -> Plan | None:
    """The plan on the machines that were asked for; None where nobody knows the devices, or it is sent anyway."""
    if machines.cluster is None:
        return None
    try:
        found = plan(spec, machines.cluster, (machines.ranks,) if machines.ranks else (), site.price)
    except UserError as error:
        if anyway:
            return None
        raise UserError(f"{error}; {ANYWAY}") from None
    if found.chosen is None and not anyway:
        raise UserError(f"the plan says that this cannot work: {' '.join(found.advice)}; {ANYWAY}")
    return found if found.chosen is not None else None


def _who_chose(machines: Machines, asked: Asked, spec: RunSpec) -> str:
    if asked.keys() & {"nodes", "gpus_per_node", "ranks_per_node"}:
        return "asked for"
    if machines.ranks is None:
        return "what the plan chooses"
    if spec.origin("parallel.ranks") != DEFAULT:
        return "parallel.ranks of the run"
    return "nobody asked for more" if machines.ranks == 1 else "all GPUs of a node"


def _layout_words(found: Plan | None) -> str:
    if found is None or found.chosen is None:
        return "; there is no plan for these devices (a site file names them with  cluster: 4xA100)"
    price = found.chosen.price
    memory = f"{size(price.memory.total_bytes)} of {size(price.capacity_bytes)} per device"
    return f"; {price.layout.strategy}, {memory}, {duration(price.step_s)} per step"


def _set_time(made: JobRequest, site: SiteFile, asked: Asked, partition: Partition | None, anyway: bool) -> None:
    """The limit of one job; a run that needs more goes on in another."""
    chosen = made.plan.chosen if made.plan is not None else None
    need = None if chosen is None or chosen.hours is None else chosen.hours * SPARE
    limits = [h for h in (site.hours, partition.hours if partition else None) if h is not None]
    limit = min(limits, default=None)
    if "time" in asked:
        made.hours, why = hours_of(str(asked["time"]), "--time"), "asked for"
        if limit is not None and made.hours > limit:
            raise UserError(
                f"--time {asked['time']}: a job may take {duration(limit * 3600)} here; a run that needs more "
                "goes on in another job by itself, so leave --time out"
            )
    elif need is not None and chosen is not None and chosen.hours is not None:
        wanted = max(SHORTEST_H, need)
        made.hours = min(wanted, limit or math.inf)
        why = (
            f"{duration(chosen.hours * 3600)} planned × {SPARE:g}" if wanted == need else "the least that is asked for"
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
    first_s = START_S + site.warn_s + (chosen.price.start_s + chosen.price.step_s if chosen is not None else 0.0)
    if made.hours * 3600 < first_s and not anyway:
        raise UserError(
            f"a job of {duration(made.hours * 3600)} would end before its first checkpoint: ranks need about "
            f"{duration(first_s - site.warn_s)} to start and make a step, and save {site.warn_s} s before the end; "
            f"use  --time {math.ceil(first_s / 60) + 1}m  or more, or a smaller warn_s in the site file; {ANYWAY}"
        )


def _set_options(made: JobRequest, site: SiteFile, asked: Asked, partition: Partition | None) -> None:
    """What else sbatch is told."""
    given: dict[str, Any] = {
        "partition": asked.get("partition") or site.partition,
        "account": asked.get("account") or site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "cpus-per-task": str(site.cpus_per_rank) if site.cpus_per_rank else None,
        "mem": memory_of(str(asked["memory"]), "--memory") if "memory" in asked else site.memory,
    }
    chosen = made.plan.chosen if made.plan is not None else None
    if given["mem"] is None and chosen is not None and not made.gpus:
        bytes_ = made.per_node * (chosen.price.memory.total_bytes * SPARE + PROCESS_BYTES)
        most = partition.memory_mb if partition else 0
        mb = math.ceil(bytes_ / 1e6)
        given["mem"] = f"{min(mb, most) if most else mb}M"
        why = f"{size(PROCESS_BYTES)} per process, and the plan × {SPARE:g}"
        if most and mb > most:
            why, bytes_ = f"all that a node has; {size(bytes_)} would be {why}", most * 1e6
        made.reasons.append(f"{size(bytes_)} of memory per node: {why}")
    made.options = {**{key: value for key, value in given.items() if value}, **site.options}
