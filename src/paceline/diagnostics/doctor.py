"""Run all checks on this machine, or on all nodes of a job."""

import os
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from paceline.config import SpecSource, resolve_spec
from paceline.diagnostics import device_checks, network_checks, system_checks
from paceline.diagnostics.nodes import Rendezvous, RendezvousFailed, examine_nodes, join_rendezvous
from paceline.diagnostics.results import ALL_NODES, Check, CheckContext, CheckResult, Examination, Health, run_checks
from paceline.errors import UserError
from paceline.io.format import number
from paceline.launch.environment import SINGLE_RANK, detect_rank

CHECKS: Mapping[str, Sequence[Check]] = {
    "versions": (system_checks.check_software, system_checks.check_cuda),
    "devices": (
        device_checks.check_visible,
        device_checks.check_free_memory,
        device_checks.check_speed,
        device_checks.check_peers,
    ),
    "network": (
        network_checks.check_own_name,
        network_checks.check_interface,
        network_checks.check_port,
        network_checks.check_infiniband,
        network_checks.check_variables,
    ),
    "files": (system_checks.check_shared_memory, system_checks.check_disk_space, system_checks.check_disk_speed),
    "limits": (
        system_checks.check_open_files,
        system_checks.check_processes,
        system_checks.check_locked_memory,
        system_checks.check_cores,
    ),
    "data": (system_checks.check_loading,),
}
LOCAL_CHECKS_S = 120.0
VISIBLE_S = 3.0
RATE_TRIES = 2
SLOW_NODE = 0.4


def doctor(spec: SpecSource | None = None, out: str | Path = "runs", nodes: Sequence[str] = ()) -> Examination:
    """Examine this machine, all nodes of the job that this process is a rank of, or the named `nodes`.

    With a run (a spec, a run file, its content or a Workload class) its data are checked too; `out` is where runs would
    be written.
    """
    if nodes:
        if not isinstance(spec, str | Path | None):
            message = "nodes: other nodes cannot see a run that is not a file; write it to one, and name that"
            raise UserError(message, code="not-supported", key="nodes")
        return examine_nodes(nodes, [] if spec is None else [str(spec)], Path(out))
    rank_info = detect_rank(os.environ) or SINGLE_RANK
    return examine(CheckContext(Path(out), os.environ, None if spec is None else resolve_spec(spec), rank_info))


def examine(context: CheckContext) -> Examination:
    """Run the checks; on nodes other than the first the results are empty, since they were sent to the first."""
    start_s, host = time.perf_counter(), socket.gethostname()
    hosts: Sequence[str] = [host]
    if context.rank_info.world == 1:
        found = run_checks(CHECKS, context, host)
    else:
        try:
            rendezvous = join_rendezvous(context.rank_info)
            hosts = rendezvous.hosts
            results = [] if rendezvous.node is None else _check_nodes(rendezvous, context)
            found = results if rendezvous.node == 0 else []
        except RendezvousFailed as error:
            own = [] if context.rank_info.local_rank else run_checks(CHECKS, context, host)
            found = [*own, error.finding]
    return Examination(found, time.perf_counter() - start_s, hosts)


def _check_nodes(rendezvous: Rendezvous, context: CheckContext) -> list[CheckResult]:
    assert rendezvous.node is not None
    found: list[CheckResult] = []
    try:
        mine = run_checks(CHECKS, context, rendezvous.hosts[rendezvous.node])
        gathered = rendezvous.gather("findings", [asdict(finding) for finding in mine], LOCAL_CHECKS_S)
        found += merge_results([[CheckResult.parse(values) for values in some] for some in gathered])
        if len(rendezvous.hosts) == 1:
            return found
        versions = rendezvous.gather("versions", system_checks.collect_versions())
        found += system_checks.compare_versions(dict(zip(rendezvous.hosts, versions, strict=True)))
        rates = [device_checks.measure_core_rate() for _ in range(RATE_TRIES)]  # other programs only lower them
        found += _compare_core_speeds(rendezvous.hosts, rendezvous.gather("cores", max(rates)))
        found += network_checks.check_links(rendezvous)
        found += _check_shared_folder(rendezvous, system_checks.find_existing_folder(context.folder))
        rendezvous.leave()
    except RendezvousFailed as error:
        found.append(error.finding)
    topics = list(dict.fromkeys(one.topic for one in found))
    checks = list(dict.fromkeys((one.topic, one.check) for one in found))
    return sorted(found, key=lambda one: (topics.index(one.topic), checks.index((one.topic, one.check))))


def merge_results(nodes: Sequence[Sequence[CheckResult]]) -> list[CheckResult]:
    rows: dict[tuple[str, str, Health], list[CheckResult]] = {}
    for finding in (finding for node in nodes for finding in node):
        rows.setdefault((finding.topic, finding.check, finding.verdict), []).append(finding)
    found: list[CheckResult] = []
    for (*_, verdict), same in rows.items():
        if verdict in (Health.OK, Health.NOT_HERE) and len(same) > 1:
            same = [replace(same[0], host=ALL_NODES if len(same) >= len(nodes) else f"{len(same)} nodes")]
        found += same
    return found


def _compare_core_speeds(hosts: Sequence[str], rates: Sequence[float]) -> Iterator[CheckResult]:
    median = statistics.median(rates)
    for host, rate in zip(hosts, rates, strict=True):
        if rate < SLOW_NODE * median:
            found, usual = (f"{number(value / 1e9, 3)} GFLOP/s" for value in (rate, median))
            remedy = "uptime  there: another program may be at work; every step waits for the slowest node"
            yield CheckResult("devices", "slow node", f"{host}: {found}", f"about {usual}", Health.LOOK, remedy, host)


def _check_shared_folder(rendezvous: Rendezvous, folder: Path) -> Iterator[CheckResult]:
    """Check that all nodes see what the main node writes, as checkpoints and resuming need it."""
    name = rendezvous.gather("token", f".paceline-doctor-{secrets.token_hex(6)}")[0]
    file = folder / name
    if rendezvous.node == 0:
        with suppress(OSError):
            file.write_text(name)
    rendezvous.gather("written", None)
    seen = rendezvous.gather("seen", _wait_for_file(file))
    if rendezvous.node == 0:
        file.unlink(missing_ok=True)
        blind = [host for host, sees in zip(rendezvous.hosts, seen, strict=True) if not sees]
        by = f"not seen by {', '.join(blind)}" if blind else "seen by all"
        verdict, expected = Health.LOOK if blind else Health.OK, "one folder for all nodes"
        remedy = "--out FOLDER  on a file system that all nodes share"
        found = f"{folder} of {rendezvous.hosts[0]} is {by}"
        yield CheckResult("files", "shared folder", found, expected, verdict, remedy, ALL_NODES)


def _wait_for_file(file: Path) -> bool:
    end_s = time.monotonic() + VISIBLE_S
    while time.monotonic() < end_s:
        with suppress(OSError):
            os.listdir(file.parent)  # makes a network file system look the folder up again
            if file.read_text() == file.name:
                return True
        time.sleep(0.05)
    return False
