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

from paceline.errors import UserError
from paceline.examining import data, devices, files, limits, network, versions
from paceline.examining.meeting import Meeting, NotMet, meet
from paceline.examining.pairs import between_nodes
from paceline.examining.results import EVERYWHERE, Check, CheckResult, Examination, Health, Surroundings, carried_out
from paceline.launch.environment import ALONE, detect
from paceline.record.units import number
from paceline.spec import Source, spec_of

CHECKS: Sequence[Check] = (
    *(versions.software, versions.cuda),
    *(devices.visible, devices.free_memory, devices.speed, devices.peers, devices.cores_speed),
    *(network.own_name, network.interface, network.port, network.infiniband, network.variables),
    *(files.shared_memory, files.room, files.disk_speed),
    *(limits.open_files, limits.processes, limits.locked_memory, limits.memory, limits.cores),
    data.loading,
)
LOCAL_S = 120.0
"""For the checks of one node; data may have to be prepared."""
SEEN_S = 3.0
"""For a file to be seen by other nodes."""
TRIES = 2
SLOW_NODE = 0.4
"""Of the median of the nodes, in products of their cores."""


def doctor(spec: Source | None = None, out: str | Path = "runs", nodes: Sequence[str] = ()) -> Examination:
    """Look at this machine, or at all nodes of the job that this process is a rank of, or at the named `nodes`.

    With a run (a spec, a run file, its content or a Workload class) its data are looked at too; `out` is where runs
    would be written.
    """
    if nodes:
        from paceline.examining.start_nodes import examine_nodes

        if not isinstance(spec, str | Path | None):
            raise UserError("nodes: other nodes cannot see a run that is not a file; write it to one, and name that")
        return examine_nodes(nodes, [] if spec is None else [str(spec)], Path(out))
    place = detect(os.environ) or ALONE
    return examine(Surroundings(Path(out), os.environ, None if spec is None else spec_of(spec), place))


def examine(here: Surroundings) -> Examination:
    """On ranks other than the first, what they found by themselves is told to it, and is nothing here."""
    began = time.perf_counter()
    if here.place.world == 1:
        return Examination(_alone(here), time.perf_counter() - began, [socket.gethostname()])
    try:
        meeting = meet(here.place)
    except NotMet as error:
        found = [error.finding] if here.place.local_rank else [*_alone(here), error.finding]
        return Examination(found, time.perf_counter() - began, [socket.gethostname()])
    if meeting.node is None:
        return Examination([], time.perf_counter() - began)
    found = _together(meeting, here)
    return Examination(found if meeting.node == 0 else [], time.perf_counter() - began, meeting.hosts)


def _alone(here: Surroundings) -> list[CheckResult]:
    return carried_out(CHECKS, here, socket.gethostname())


def _together(meeting: Meeting, here: Surroundings) -> list[CheckResult]:
    assert meeting.node is not None
    found: list[CheckResult] = []
    try:
        mine = carried_out(CHECKS, here, meeting.hosts[meeting.node])
        told = meeting.everyone("findings", [asdict(finding) for finding in mine], LOCAL_S)
        found += merged([[_finding(values) for values in some] for some in told])
        if len(meeting.hosts) == 1:
            return found
        known = meeting.everyone("versions", versions.facts())
        found += versions.compared(dict(zip(meeting.hosts, known, strict=True)))
        rates = [devices.core_rates()[0] for _ in range(TRIES)]  # other programs only make them slower
        found += _core_speeds(meeting, meeting.everyone("cores", max(rates)))
        found += between_nodes(meeting)
        found += _shared_folder(meeting, files.existing(here.folder))
        meeting.leave()
    except NotMet as error:
        found.append(error.finding)
    return in_order(found)


def in_order(found: Sequence[CheckResult]) -> list[CheckResult]:
    """By topic and check, each where it comes first."""
    topics = list(dict.fromkeys(finding.topic for finding in found))
    checks = list(dict.fromkeys(finding.check for finding in found))
    return sorted(found, key=lambda finding: (topics.index(finding.topic), checks.index(finding.check)))


def _finding(values: dict[str, Any]) -> CheckResult:
    return CheckResult(**{**values, "verdict": Health(values["verdict"])})


def merged(nodes: Sequence[Sequence[CheckResult]]) -> list[CheckResult]:
    """What is fine on several nodes in one row, as the first of them found it; what is not, by node."""
    rows: dict[tuple[str, str, Health], list[CheckResult]] = {}
    for finding in (finding for node in nodes for finding in node):
        rows.setdefault((finding.topic, finding.check, finding.verdict), []).append(finding)
    found: list[CheckResult] = []
    for (*_, verdict), same in rows.items():
        quiet = verdict in (Health.OK, Health.NOT_HERE) and len(same) > 1
        where = EVERYWHERE if len(same) >= len(nodes) else f"{len(same)} nodes"
        found += [CheckResult(**{**asdict(same[0]), "verdict": verdict, "host": where})] if quiet else same
    return found


def _core_speeds(meeting: Meeting, rates: Sequence[float]) -> Iterator[CheckResult]:
    median = statistics.median(rates)
    for host, rate in zip(meeting.hosts, rates, strict=True):
        if rate < SLOW_NODE * median:
            said, usual = (f"{number(value / 1e9, 3)} GFLOP/s" for value in (rate, median))
            remedy = "uptime  there: another program may be at work; every step waits for the slowest node"
            yield CheckResult("devices", "slow node", f"{host}: {said}", f"about {usual}", Health.LOOK, remedy, host)


def _shared_folder(meeting: Meeting, folder: Path) -> Iterator[CheckResult]:
    """Whether all nodes see what the main one writes: checkpoints and resuming need it."""
    name = meeting.everyone("token", f".paceline-doctor-{secrets.token_hex(6)}")[0]
    file = folder / name
    if meeting.node == 0:
        with suppress(OSError):
            file.write_text(name)
    meeting.everyone("written", None)
    seen = meeting.everyone("seen", _appears(file))
    if meeting.node == 0:
        file.unlink(missing_ok=True)
        blind = [host for host, sees in zip(meeting.hosts, seen, strict=True) if not sees]
        found = f"{folder} of {meeting.hosts[0]} is " + (f"not seen by {', '.join(blind)}" if blind else "seen by all")
        yield CheckResult(
            *("files", "shared folder", found, "one folder for all nodes"),
            *(
                Health.LOOK if blind else Health.OK,
                "--out FOLDER  on a file system that all nodes share",
                EVERYWHERE,
            ),
        )


def _appears(file: Path) -> bool:
    ends = time.monotonic() + SEEN_S
    while time.monotonic() < ends:
        with suppress(OSError):
            os.listdir(file.parent)  # what a network file system remembers of the folder is looked up again
            if file.read_text() == file.name:
                return True
        time.sleep(0.05)
    return False
