"""All checks, on this machine or on all nodes of a job."""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.config import SpecSource, resolve_spec
from paceline.diagnostics import data_checks, device_checks, network_checks, system_checks
from paceline.diagnostics.link_checks import check_links
from paceline.diagnostics.nodes import Rendezvous, RendezvousFailed, join_rendezvous
from paceline.diagnostics.results import ALL_NODES, Check, CheckContext, CheckResult, Examination, Health, run_checks
from paceline.errors import UserError
from paceline.io.format import number
from paceline.launch.environment import SINGLE_RANK, detect_rank

CHECKS: Sequence[Check] = (
    *(system_checks.check_software, system_checks.check_cuda),
    *(
        device_checks.check_visible,
        device_checks.check_free_memory,
        device_checks.check_speed,
        device_checks.check_peers,
        device_checks.check_cores_speed,
    ),
    *(
        network_checks.check_own_name,
        network_checks.check_interface,
        network_checks.check_port,
        network_checks.check_infiniband,
        network_checks.check_variables,
    ),
    *(system_checks.check_shared_memory, system_checks.check_disk_space, system_checks.check_disk_speed),
    *(
        system_checks.check_open_files,
        system_checks.check_processes,
        system_checks.check_locked_memory,
        system_checks.check_memory_limit,
        system_checks.check_cores,
    ),
    data_checks.check_loading,
)
LOCAL_CHECKS_S = 120.0
"""For the checks of one node; data may have to be prepared."""
VISIBLE_S = 3.0
"""For a file to be seen by other nodes."""
RATE_TRIES = 2
SLOW_NODE = 0.4
"""Of the median of the nodes, in products of their cores."""


def doctor(spec: SpecSource | None = None, out: str | Path = "runs", nodes: Sequence[str] = ()) -> Examination:
    """Look at this machine, or at all nodes of the job that this process is a rank of, or at the named `nodes`.

    With a run (a spec, a run file, its content or a Workload class) its data are looked at too; `out` is where runs
    would be written.
    """
    if nodes:
        from paceline.diagnostics.nodes import examine_nodes

        if not isinstance(spec, str | Path | None):
            raise UserError("nodes: other nodes cannot see a run that is not a file; write it to one, and name that")
        return examine_nodes(nodes, [] if spec is None else [str(spec)], Path(out))
    place = detect_rank(os.environ) or SINGLE_RANK
    return examine(CheckContext(Path(out), os.environ, None if spec is None else resolve_spec(spec), place))


def examine(here: CheckContext) -> Examination:
    """On ranks other than the first, what they found by themselves is told to it, and is nothing here."""
    began = time.perf_counter()
    if here.place.world == 1:
        return Examination(_check_machine(here), time.perf_counter() - began, [socket.gethostname()])
    try:
        meeting = join_rendezvous(here.place)
    except RendezvousFailed as error:
        found = [error.finding] if here.place.local_rank else [*_check_machine(here), error.finding]
        return Examination(found, time.perf_counter() - began, [socket.gethostname()])
    if meeting.node is None:
        return Examination([], time.perf_counter() - began)
    found = _check_nodes(meeting, here)
    return Examination(found if meeting.node == 0 else [], time.perf_counter() - began, meeting.hosts)


def _check_machine(here: CheckContext) -> list[CheckResult]:
    return run_checks(CHECKS, here, socket.gethostname())


def _check_nodes(meeting: Rendezvous, here: CheckContext) -> list[CheckResult]:
    assert meeting.node is not None
    found: list[CheckResult] = []
    try:
        mine = run_checks(CHECKS, here, meeting.hosts[meeting.node])
        told = meeting.everyone("findings", [asdict(finding) for finding in mine], LOCAL_CHECKS_S)
        found += merge_results([[_parse_result(values) for values in some] for some in told])
        if len(meeting.hosts) == 1:
            return found
        known = meeting.everyone("versions", system_checks.collect_versions())
        found += system_checks.compare_versions(dict(zip(meeting.hosts, known, strict=True)))
        rates = [
            device_checks.measure_core_rates()[0] for _ in range(RATE_TRIES)
        ]  # other programs only make them slower
        found += _compare_core_speeds(meeting, meeting.everyone("cores", max(rates)))
        found += check_links(meeting)
        found += _check_shared_folder(meeting, system_checks.find_existing_folder(here.folder))
        meeting.leave()
    except RendezvousFailed as error:
        found.append(error.finding)
    return sort_results(found)


def sort_results(found: Sequence[CheckResult]) -> list[CheckResult]:
    """By topic and check, each where it comes first."""
    topics = list(dict.fromkeys(finding.topic for finding in found))
    checks = list(dict.fromkeys((finding.topic, finding.check) for finding in found))
    return sorted(found, key=lambda one: (topics.index(one.topic), checks.index((one.topic, one.check))))


def _parse_result(values: dict[str, Any]) -> CheckResult:
    return CheckResult(**{**values, "verdict": Health(values["verdict"])})


def merge_results(nodes: Sequence[Sequence[CheckResult]]) -> list[CheckResult]:
    """What is fine on several nodes in one row, as the first of them found it; what is not, by node."""
    rows: dict[tuple[str, str, Health], list[CheckResult]] = {}
    for finding in (finding for node in nodes for finding in node):
        rows.setdefault((finding.topic, finding.check, finding.verdict), []).append(finding)
    found: list[CheckResult] = []
    for (*_, verdict), same in rows.items():
        quiet = verdict in (Health.OK, Health.NOT_HERE) and len(same) > 1
        where = ALL_NODES if len(same) >= len(nodes) else f"{len(same)} nodes"
        found += [CheckResult(**{**asdict(same[0]), "verdict": verdict, "host": where})] if quiet else same
    return found


def _compare_core_speeds(meeting: Rendezvous, rates: Sequence[float]) -> Iterator[CheckResult]:
    median = statistics.median(rates)
    for host, rate in zip(meeting.hosts, rates, strict=True):
        if rate < SLOW_NODE * median:
            said, usual = (f"{number(value / 1e9, 3)} GFLOP/s" for value in (rate, median))
            remedy = "uptime  there: another program may be at work; every step waits for the slowest node"
            yield CheckResult("devices", "slow node", f"{host}: {said}", f"about {usual}", Health.LOOK, remedy, host)


def _check_shared_folder(meeting: Rendezvous, folder: Path) -> Iterator[CheckResult]:
    """Whether all nodes see what the main one writes: checkpoints and resuming need it."""
    name = meeting.everyone("token", f".paceline-doctor-{secrets.token_hex(6)}")[0]
    file = folder / name
    if meeting.node == 0:
        with suppress(OSError):
            file.write_text(name)
    meeting.everyone("written", None)
    seen = meeting.everyone("seen", _wait_for_file(file))
    if meeting.node == 0:
        file.unlink(missing_ok=True)
        blind = [host for host, sees in zip(meeting.hosts, seen, strict=True) if not sees]
        found = f"{folder} of {meeting.hosts[0]} is " + (f"not seen by {', '.join(blind)}" if blind else "seen by all")
        yield CheckResult(
            *("files", "shared folder", found, "one folder for all nodes"),
            *(
                Health.LOOK if blind else Health.OK,
                "--out FOLDER  on a file system that all nodes share",
                ALL_NODES,
            ),
        )


def _wait_for_file(file: Path) -> bool:
    ends = time.monotonic() + VISIBLE_S
    while time.monotonic() < ends:
        with suppress(OSError):
            os.listdir(file.parent)  # what a network file system remembers of the folder is looked up again
            if file.read_text() == file.name:
                return True
        time.sleep(0.05)
    return False
