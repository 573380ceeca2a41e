"""Decide what a job requests: the user's options first, then the site file, then the plan."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from paceline.config import DEFAULT, RunSpec
from paceline.errors import UserError, did_you_mean
from paceline.hardware.catalogue import LOCAL, match_driver_name, parse_cluster
from paceline.io.arguments import option_error, parse_hours
from paceline.io.format import duration, percent, plural, size
from paceline.layout import layout_of
from paceline.planner.candidates import PROCESS_BYTES
from paceline.planner.emit import MIN_JOB_H, TIME_MARGIN
from paceline.planner.plan import Plan, plan
from paceline.planner.rows import PlanRow
from paceline.script.workload import check_own_loop
from paceline.slurm.commands import Partition
from paceline.slurm.site_file import SiteFile, check_memory

STARTUP_S = 30.0
LEAST_GAIN = 1.05  # of the time that fewer devices need, which more of them should save
ANYWAY_HINT = "submit it all the same with  --anyway"


class JobOptions(TypedDict, total=False):
    """What a user may ask for; the rest comes from the site and the plan."""

    nodes: str | int
    """`2`, or `1-2` if fewer are enough."""
    gpus_per_node: int
    ranks_per_node: int
    time: str
    partition: str
    account: str
    memory: str


MACHINE_OPTIONS = {"nodes", "gpus_per_node", "ranks_per_node"}


@dataclass(frozen=True)
class MachineRequest:
    """Nodes and ranks per node; None leaves them to the plan."""

    least: int | None
    most: int | None
    per_node: int | None
    on_gpu: bool
    cluster: str | None
    """What the plan prices; None if the devices are unknown."""

    @property
    def ranks(self) -> int | None:
        return None if self.most is None or self.per_node is None else self.most * self.per_node


def resolve_machines(spec: RunSpec, site: SiteFile, asked: JobOptions, partition: Partition | None) -> MachineRequest:
    named = site.cluster or (spec.cluster if spec.cluster != LOCAL else None)
    cluster = parse_cluster(named) if named is not None else None
    gpus_named = not cluster.device.synchronous if cluster else bool(site.gpus_per_node or site.gpu_type)
    device = spec.parallel.device
    on_gpu = "gpus_per_node" in asked or device == "cuda" or (device != "cpu" and gpus_named)
    gpus = site.gpus_per_node or (partition.gpus if partition is not None else None)
    nodes, per_node = _parse_nodes(str(asked.get("nodes", ""))), resolve_ranks_per_node(asked, gpus, partition)
    if per_node is None and nodes:
        per_node = (gpus or (cluster.per_node if cluster else 1)) if on_gpu else 1
    elif per_node is None and named is None:
        usual = (on_gpu and gpus) or 1
        per_node = spec.parallel.ranks if spec.origin("parallel.ranks") != DEFAULT else usual
    least, most = nodes or ((1, 1) if per_node is not None else (None, None))
    kind = site.gpu_type or (partition.gpu_type if partition is not None else "")
    return MachineRequest(least, most, per_node, on_gpu, _cluster_to_price(named, on_gpu, kind, most, per_node))


def _parse_nodes(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    form = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    least, most = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
    if not 1 <= least <= most:
        reason = f"{text}: this is not a number of nodes; write it as  --nodes 2,  or  --nodes 1-2"
        raise option_error("--nodes", reason)
    return least, most


def resolve_ranks_per_node(asked: JobOptions, available: int | None, partition: Partition | None) -> int | None:
    """Return the ranks per node that the user asks for, if any; `available` is the number of GPUs of a node."""
    gpus, ranks = asked.get("gpus_per_node"), asked.get("ranks_per_node")
    for option, value in (("--gpus-per-node", gpus), ("--ranks-per-node", ranks)):
        if value is not None and value < 1:
            raise option_error(option, f"{value}: give 1 or more, or leave it out")
    if gpus is not None and available is not None and gpus > available:
        node = f"a node of partition {partition.name}" if partition is not None else "a node"
        use = f"use {available}, or more nodes" if available else "use another partition"
        raise option_error("--gpus-per-node", f"{gpus}: {node} has {available or 'none'}; {use}", "unavailable")
    if gpus is not None and ranks is not None and ranks != gpus:
        reason = f"{ranks}: each rank has a GPU, and --gpus-per-node is {gpus}; give one of them"
        raise option_error("--ranks-per-node", reason, "conflict")
    return gpus if gpus is not None else ranks


def _cluster_to_price(
    named: str | None, on_gpu: bool, kind: str, nodes: int | None, per_node: int | None
) -> str | None:
    """Return the named cluster, with the requested machines if it has the short form, or one of known devices."""
    if named is not None:
        form = re.fullmatch(r"(?:\d+\s*x\s*)?\d+\s*x\s*([^@+]+.*)", named.strip(), re.IGNORECASE)
        return f"{nodes}x{per_node}x{form[1]}" if form and nodes and per_node else named
    device = match_driver_name(kind) if on_gpu and kind else None
    if on_gpu and device is None:
        return None
    return f"{nodes or 1}x{per_node or 1}x{device.name if device is not None else 'CPU'}"


@dataclass
class JobRequest:
    """A job that can be submitted, and the reasons for what it requests."""

    spec: RunSpec
    nodes: str
    per_node: int
    hours: float
    gpus: str = ""
    options: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    usd_per_device_hour: float | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return int(self.nodes.rpartition("-")[2]) * self.per_node

    @property
    def chosen(self) -> PlanRow | None:
        return self.plan.chosen if self.plan is not None else None

    @property
    def note(self) -> str:
        planned = f", {duration(self.chosen.hours * 3600)} planned" if self.chosen and self.chosen.hours else ""
        return f"{self.spec.name}: {layout_of(self.spec).strategy} on {plural(self.ranks, 'rank')}{planned}"


def build_job_request(
    spec: RunSpec, site: SiteFile, asked: JobOptions, partitions: Mapping[str, Partition], *, anyway: bool = False
) -> JobRequest:
    """Decide what to request, or raise the reason why it cannot work."""
    partition = find_partition(asked, site, partitions)
    machines = resolve_machines(spec, site, asked, partition)
    found = _plan_request(spec, site, machines, anyway)
    cluster = found.chosen.price.where.cluster if found and found.chosen else None
    per_node = machines.per_node or (cluster.per_node if cluster else 1)
    most = machines.most or (cluster.nodes if cluster else 1)
    available = site.nodes or (partition.nodes if partition else None)
    if available is not None and most > available:
        reason = f"{most}: a job may have {available} here; use  --nodes {available}"
        raise option_error("--nodes", reason, "unavailable")
    least = 1 if site.fewer_nodes and machines.least == machines.most else machines.least or most
    if spec.parallel.least_ranks is not None:
        least = min(least, -(-spec.parallel.least_ranks // per_node))
    overrides = {**(found.overrides() if found is not None else {}), "parallel.ranks": most * per_node}
    ready = spec.replace(overrides, "paceline submit")
    layout_of(ready.replace({"parallel.ranks": least * per_node}))  # raises what cannot work with the fewest nodes
    nodes = str(most) if least == most else f"{least}-{most}"
    request = JobRequest(ready, nodes, per_node, 0.0, plan=found, overrides=overrides)
    request.usd_per_device_hour = found.rates.usd if found is not None else site.price
    ways = f"{nodes} node{'s' * (nodes != '1')} × {plural(per_node, 'rank')}"
    choice = "what the plan chooses" if machines.ranks is None else "of the run or the site, or the least"
    choice = "asked for" if asked.keys() & MACHINE_OPTIONS else choice
    request.reasons.append(f"{ways}: {choice}{_describe_layout(found)}")
    if machines.on_gpu:
        request.gpus = format_gpus(site.gpu_type or (partition.gpu_type if partition else ""), per_node)
    elif partition is not None and partition.gpus and spec.parallel.device != "cpu":
        nodes_have = f"nodes of {partition.name} have {partition.gpus} (--gpus-per-node)"
        request.reasons.append(f"no GPU: none is asked for; {nodes_have}")
    _set_time_limit(request, site, asked, partition, anyway)
    request.options = build_sbatch_options(site, asked, site.cpus_per_rank)
    if request.gpus:
        _take_share(request, partition)
    elif "mem" not in request.options:
        _set_memory(request, partition)
    request.reasons += _weigh_request(request, spec, machines)
    return request


def format_gpus(kind: str | None, count: int) -> str:
    """Return the GPUs of a node as sbatch takes them: `a100:4`, or `4`."""
    return f"{kind}:{count}" if kind else str(count)


def find_partition(asked: JobOptions, site: SiteFile, partitions: Mapping[str, Partition]) -> Partition | None:
    """Return the requested partition, None without a name or a list; raise UserError if the list lacks it."""
    name = asked.get("partition") or site.partition
    if name is None or not partitions:
        return None
    if name not in partitions:
        hint = did_you_mean(name, partitions)
        known = f"{' There are' if hint else '; there are'} {', '.join(partitions)}"
        source = "--partition" if asked.get("partition") else "partition in the site file"
        raise option_error(source, f"{name}: there is no such partition{hint}{known}", "unknown-name")
    return partitions[name]


def _plan_request(spec: RunSpec, site: SiteFile, machines: MachineRequest, anyway: bool) -> Plan | None:
    """Return the plan on the requested machines; None if the devices are unknown, or nothing fits and `anyway`."""
    try:
        if machines.cluster is None:
            check_own_loop(spec)
            return None
        found = plan(spec, machines.cluster, (machines.ranks,) if machines.ranks else (), site.price)
    except UserError as error:
        if anyway:
            return None
        hint = "" if error.code == "invalid-workload" else f"; {ANYWAY_HINT}"
        raise UserError(f"{error}{hint}", code=error.code, key=error.key) from None
    if found.chosen is None and not anyway:
        message = f"the plan says that this cannot work: {' '.join(found.advice)}; {ANYWAY_HINT}"
        raise UserError(message, code="does-not-fit")
    return found if found.chosen is not None else None


def _describe_layout(found: Plan | None) -> str:
    if found is None or found.chosen is None:
        return "; there is no plan for these devices (a site file names them with  cluster: 4xA100)"
    price = found.chosen.price
    memory = f"{size(price.memory.total_bytes)} of {size(price.capacity_bytes)} per device"
    return f"; {price.layout.strategy}, {memory}, {duration(price.step_s)} per step"


def _set_time_limit(
    request: JobRequest, site: SiteFile, asked: JobOptions, partition: Partition | None, anyway: bool
) -> None:
    """Set the limit of one job; a run that needs more continues in another job."""
    chosen = request.chosen
    planned = chosen.hours if chosen is not None else None
    needed = (planned or 0.0) * TIME_MARGIN
    limits = [h for h in (site.hours, partition.hours if partition else None) if h is not None]
    limit = min(limits, default=math.inf)
    if "time" in asked:
        hours, reason = parse_hours(str(asked["time"]), "--time"), "asked for"
        if hours > limit:
            allowed = f"a job may take {duration(limit * 3600)} here; a longer run continues in another job"
            raise option_error("--time", f"{asked['time']}: {allowed}, so leave --time out", "does-not-fit")
    elif planned is not None:
        hours = min(max(MIN_JOB_H, needed), limit)
        reason = f"{duration(planned * 3600)} planned × {TIME_MARGIN:g}" if hours == needed else "the limit here"
        reason = "the least that is asked for" if hours == MIN_JOB_H else reason
    elif limits:
        hours, reason = limit, "the limit here; the plan does not know how long the run is"
    else:
        reason = "how long may a job take? the plan does not know, and there is no limit; give  --time 2h"
        raise option_error("--time", reason, "missing-value")
    request.hours = hours
    jobs = f", in about {math.ceil(needed / hours):,} jobs, one after the other" if needed > hours else ""
    request.reasons.append(f"{duration(hours * 3600)} for a job: {reason}{jobs}")
    first_s = STARTUP_S + (chosen.price.start_s + chosen.price.step_s if chosen is not None else 0.0)
    if hours * 3600 < first_s + site.warn_s and not anyway:
        enough = math.ceil((first_s + site.warn_s) / 60) + 1
        reason = f"a job of {duration(hours * 3600)} would end before its first checkpoint: ranks need about "
        reason += f"{duration(first_s)} to start and make a step, and save {site.warn_s} s before the end; "
        reason += f"use  --time {enough}m  or more, or a smaller warn_s in the site file; {ANYWAY_HINT}"
        raise option_error("--time", reason, "does-not-fit")


def build_sbatch_options(site: SiteFile, asked: JobOptions, cpus: int | None) -> dict[str, str]:
    """Return the other options of sbatch, without their dashes; those of the site file count last."""
    options = {
        "partition": asked.get("partition") or site.partition,
        "account": asked.get("account") or site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "cpus-per-task": str(cpus) if cpus else None,
        "mem": check_memory(str(asked["memory"]), "--memory") if "memory" in asked else site.memory,
    }
    return {**{name: value for name, value in options.items() if value}, **site.options}


def _take_share(request: JobRequest, partition: Partition | None) -> None:
    """Request the cores and the memory of a node that belong to its GPUs, where nobody says otherwise."""
    if partition is None or not partition.gpus:
        return
    share = min(1.0, request.per_node / partition.gpus)
    cores, megabytes = partition.cores // partition.gpus, int(partition.memory_mb * share)
    if cores and "cpus-per-task" not in request.options:
        request.options["cpus-per-task"] = str(cores)
        request.reasons.append(f"{plural(cores, 'core')} for each rank: a GPU's share of a node")
    if megabytes and "mem" not in request.options:
        request.options["mem"] = f"{megabytes}M"
        request.reasons.append(f"{size(megabytes * 1e6)} of memory per node: {percent(share)} of what a node has")


def _weigh_request(request: JobRequest, spec: RunSpec, machines: MachineRequest) -> Iterator[str]:
    """Yield what the run costs, and fewer devices that would be as fast."""
    row = request.chosen
    if row is None or machines.cluster is None:
        return
    if row.cost_usd is not None and row.hours is not None:
        each = f"{duration(3600 * row.hours)} at {row.rates.usd:g} USD per hour"
        yield f"{row.cost_usd:,.2f} USD: {row.devices:,} × {each}"
    counts = [1 << k for k in range((row.devices - 1).bit_length())]
    if machines.ranks and counts:
        fewer = plan(spec, machines.cluster, counts, row.rates.usd).ranking.fastest
        if fewer is not None and fewer.run_s < row.run_s * LEAST_GAIN:
            fewest = plural(fewer.devices, "rank")
            theirs, all_of_them = duration(fewer.run_s), duration(row.run_s)
            times = "as long" if theirs == all_of_them else f"{theirs} in place of {all_of_them}"
            yield f"warning: {fewest} would take {times}: use fewer, or a larger train.global_batch"


def _set_memory(request: JobRequest, partition: Partition | None) -> None:
    """Request the planned host memory of ranks on cores, at most that of a node."""
    if request.chosen is None:
        return
    needed = request.per_node * (request.chosen.price.memory.total_bytes * TIME_MARGIN + PROCESS_BYTES)
    available = partition.memory_mb if partition else 0
    reason = f"{size(PROCESS_BYTES)} per process, and the plan × {TIME_MARGIN:g}"
    megabytes = math.ceil(needed / 1e6)
    if available and megabytes > available:
        reason = f"all that a node has; {size(needed)} would be {reason}"
        megabytes, needed = available, available * 1e6
    request.options["mem"] = f"{megabytes}M"
    request.reasons.append(f"{size(needed)} of memory per node: {reason}")
