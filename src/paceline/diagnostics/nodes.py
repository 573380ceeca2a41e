"""Start the doctor on several nodes, and let the nodes exchange what they found.

The nodes meet in a store where the ranks of a run would. No process group is made, so that the reason can be found
where one could not be; a node that does not come, or cannot be reached, is named.
"""

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from paceline.diagnostics.results import CheckResult, Examination, Health
from paceline.errors import RunFailed, get_first_line
from paceline.io.arguments import option_error
from paceline.launch.environment import RankInfo

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
NODE_TIMEOUT_S = 240.0
FORWARDED_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
RENDEZVOUS_S = 20.0
CONNECT_TRY_S, RETRY_S = 3.0, 0.2


def examine_nodes(nodes: Sequence[str], words: Sequence[str], out: Path, by: str = SSH) -> Examination:
    """Start the doctor as one rank on each node; `by` is the command that starts another one on a host."""
    if len(nodes) < 2 or len(set(nodes)) < len(nodes):
        raise option_error("--nodes", f"{','.join(nodes)}: give two or more different hosts, as in  --nodes n1,n2")
    if bad := next((node for node in nodes if not node or node.startswith("-") or not node.isprintable()), None):
        raise option_error("--nodes", f"{bad!r} is not the name of a host")
    starter = list[str]()
    with suppress(ValueError):
        starter = shlex.split(by)
    if not starter:
        raise option_error("--by", f"{by!r}: this is not a command; write it as  --by 'ssh -p 2222'")
    through_shell = Path(starter[0]).name == "ssh"  # it passes its words to a shell of the host
    port, start_s = 20_000 + secrets.randbelow(10_000), time.perf_counter()

    def ask(rank: int) -> "subprocess.CompletedProcess[str]":
        command = _build_node_command(rank, nodes, port, words, out)
        command = [*starter, nodes[rank], *([shlex.join(command)] if through_shell else command)]
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
        try:
            return subprocess.run(command, timeout=NODE_TIMEOUT_S, **given)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"not done within {NODE_TIMEOUT_S:.0f} s")

    try:
        with ThreadPoolExecutor(len(nodes)) as pool:
            answers = list(pool.map(ask, range(len(nodes))))
    except OSError as error:
        raise option_error("--by", f"{by}: cannot be started: {error.strerror}") from None
    return _merge_answers(nodes, answers, time.perf_counter() - start_s, "ssh" if by == SSH else by)


def _build_node_command(rank: int, nodes: Sequence[str], port: int, words: Sequence[str], out: Path) -> list[str]:
    values: dict[str, object] = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    values |= {"RANK": rank, "WORLD_SIZE": len(nodes), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    values |= {"MASTER_ADDR": nodes[0], "MASTER_PORT": port}
    variables = [f"{name}={value}" for name, value in values.items()]
    run = [str(Path(words[0]).absolute()), *words[1:]] if words else []
    return ["env", *variables, sys.executable, "-m", "paceline", "doctor", *run, "--out", str(out.absolute()), "--json"]


def _merge_answers(
    nodes: Sequence[str], answers: "Sequence[subprocess.CompletedProcess[str]]", seconds: float, by: str = "ssh"
) -> Examination:
    """Return the examination of the first node, with what the others could not send to it."""
    found: list[CheckResult] = []
    hosts = nodes
    for index, (node, answer) in enumerate(zip(nodes, answers, strict=True)):
        if index and answer.returncode == 0 and not answer.stdout:
            continue  # it sent its results to the first node
        try:
            values = json.loads(answer.stdout)
            results = [CheckResult.parse(one) for one in values["findings"]]
            known = list(map(str, values["hosts"]))
        except (ValueError, KeyError, TypeError, RecursionError):  # another version, or output of a shell
            reason = answer.stderr.strip().rpartition("\n")[2].strip() or "no answer"
            remedy = f"{by} {node} {sys.executable} -m paceline --version"
            result = partial(CheckResult, "nodes", "start", f"{node}: {reason}", "results of the doctor there")
            found.append(result(Health.WRONG, remedy, node))
            continue
        found += results if index == 0 else [one for one in results if one.verdict is Health.WRONG]
        hosts = known if index == 0 and len(known) == len(answers) else hosts
    return Examination(found, seconds, hosts)


class RendezvousFailed(RunFailed):
    """The nodes cannot talk; `finding` has the reason."""

    def __init__(self, finding: CheckResult) -> None:
        super().__init__(finding.found, code="unavailable")
        self.finding = finding


@dataclass
class Rendezvous:
    rank_info: RankInfo
    store: Any
    hosts: list[str]
    node: int | None
    """This node; None on ranks that are not the first of their host."""

    def send(self, name: str, value: Any) -> None:
        self.store.set(f"{name}/{self.node}", json.dumps(value))

    def receive(self, name: str, node: int, within_s: float) -> Any:
        key = f"{name}/{node}"
        try:
            self.store.wait([key], timedelta(seconds=within_s))
            return json.loads(self.store.get(key))
        except RuntimeError:
            host = self.hosts[node]
            found = f"{host} has not answered within {within_s:.0f} s ({name})"
            result = CheckResult("network", "meeting", found, "an answer", Health.WRONG, host=host)
            raise RendezvousFailed(result) from None

    def gather(self, name: str, value: Any, within_s: float | None = None) -> list[Any]:
        """Return the values of all nodes, once every node has come so far."""
        self.send(name, value)
        return [self.receive(name, node, within_s or RENDEZVOUS_S) for node in range(len(self.hosts))]

    def leave(self) -> None:
        """Leave; the main node, which has the store, waits for the others."""
        self.send("done", None)
        for node in range(len(self.hosts)) if self.node == 0 else ():
            self.receive("done", node, RENDEZVOUS_S)


def join_rendezvous(rank_info: RankInfo) -> Rendezvous:
    world, address = rank_info.world, f"{rank_info.address}:{rank_info.port}"
    if rank_info.rank:
        _wait_for_rank_0(rank_info)
    try:
        store = _open_store_in_thread(rank_info)
        store.set(f"came/{rank_info.rank}", json.dumps([socket.gethostname(), rank_info.local_rank]))
        came = [f"came/{rank}" for rank in range(world)]
        with suppress(RuntimeError):  # those that have not come are named below
            store.wait(came, timedelta(seconds=RENDEZVOUS_S))
        missing = [key for key in came if not store.check([key])]
    except (RuntimeError, OSError) as error:
        remedy = f"ss -ltnp 'sport = :{rank_info.port}'  shows who answers there; another port:  export MASTER_PORT=…"
        reason = get_first_line(error)
        raise RendezvousFailed(_port_result(rank_info, reason, "free for rank 0", remedy)) from None
    if missing:
        ranks = ", ".join(key.split("/")[1] for key in missing)
        found = f"rank {ranks} of {world} has not come to {address} within {RENDEZVOUS_S:.0f} s"
        remedy = f"start it; if it waits too, type there  nc -vz {rank_info.address} {rank_info.port}"
        expected = f"all {world} ranks"
        raise RendezvousFailed(CheckResult("network", "meeting", found, expected, Health.WRONG, remedy))
    everyone = [json.loads(store.get(key)) for key in came]
    first_ranks = [rank for rank, (_, local) in enumerate(everyone) if local == 0]
    names = [everyone[rank][0] for rank in first_ranks]
    hosts = [name if names.count(name) == 1 else f"{name}#{index}" for index, name in enumerate(names)]
    node = first_ranks.index(rank_info.rank) if rank_info.rank in first_ranks else None
    return Rendezvous(rank_info, store, hosts, node)


def _open_store_in_thread(rank_info: RankInfo) -> Any:
    """Open the store with a time limit: torch waits for ever for a server that accepts and does not answer."""
    from paceline.launch.process_group import open_store

    opened: list[Any] = []

    def open_or_fail() -> None:
        try:
            opened.append(open_store(rank_info, RENDEZVOUS_S, "doctor"))
        except Exception as error:  # raised below
            opened.append(error)

    thread = threading.Thread(target=open_or_fail, daemon=True)
    thread.start()
    limit_s = RENDEZVOUS_S + CONNECT_TRY_S
    thread.join(limit_s)
    if not opened:
        raise TimeoutError(f"connections are taken, and nothing is answered within {limit_s:.0f} s")
    if isinstance(opened[0], Exception):
        raise opened[0]
    return opened[0]


def _wait_for_rank_0(rank_info: RankInfo) -> None:
    reason, end_s = "no answer", time.monotonic() + RENDEZVOUS_S
    while time.monotonic() < end_s:
        try:
            socket.create_connection((rank_info.address, rank_info.port), CONNECT_TRY_S).close()
            return
        except OSError as error:
            reason = error.strerror or reason
        time.sleep(RETRY_S)
    remedy = "is rank 0 started, with the same MASTER_ADDR and MASTER_PORT? does a firewall drop it?"
    raise RendezvousFailed(_port_result(rank_info, reason, "rank 0 listens, and can be reached", remedy))


def _port_result(rank_info: RankInfo, reason: str, expected: str, remedy: str) -> CheckResult:
    found = f"{rank_info.address}:{rank_info.port}: {reason}"
    return CheckResult("network", "port of rank 0", found, expected, Health.WRONG, remedy)
