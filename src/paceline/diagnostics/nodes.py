"""Start the doctor on several nodes, and let the nodes exchange what they found."""

from __future__ import annotations

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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.diagnostics.results import CheckResult, Examination, Health
from paceline.errors import RunFailed, UserError
from paceline.launch.environment import RankInfo
from paceline.launch.network import open_listener

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
NODE_TIMEOUT_S = 240.0
FORWARDED_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""Variables that the other nodes are given as they are here."""


@dataclass(frozen=True)
class NodeAnswer:
    """What became of the doctor on one node."""

    host: str
    code: int
    out: str
    err: str


def examine_nodes(nodes: Sequence[str], words: Sequence[str], out: Path, by: str = SSH) -> Examination:
    """`by` starts a command on a host, which is its last word: ssh, or what does the same."""
    if len(nodes) < 2 or len(set(nodes)) < len(nodes):
        raise UserError(f"--nodes {','.join(nodes)}: give two or more different hosts, as in  --nodes n1,n2")
    if bad := next((node for node in nodes if not node or node.startswith("-") or not node.isprintable()), None):
        raise UserError(f"--nodes: {bad!r} is not the name of a host")
    start = _parse_starter(by)
    port, began = 20_000 + secrets.randbelow(10_000), time.perf_counter()
    started = []
    for rank, node in enumerate(nodes):
        command = _build_node_command(rank, nodes, port, words, out)
        try:
            started.append(
                subprocess.Popen(
                    _wrap_for_node(start, node, command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        except OSError as error:
            raise UserError(f"--by {by}: cannot be started: {error.strerror}") from None
    answers = [_collect_answer(node, process) for node, process in zip(nodes, started, strict=True)]
    return _merge_answers(answers, time.perf_counter() - began, "ssh" if by == SSH else by)


def _build_node_command(rank: int, nodes: Sequence[str], port: int, words: Sequence[str], out: Path) -> list[str]:
    place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(nodes), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": nodes[0], "MASTER_PORT": port}
    known = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    variables = [f"{name}={value}" for name, value in {**known, **place}.items()]
    run = [str(Path(words[0]).absolute()), *words[1:]] if words else []
    return ["env", *variables, sys.executable, "-m", "paceline", "doctor", *run, "--out", str(out.absolute()), "--json"]


def _parse_starter(by: str) -> list[str]:
    try:
        words = shlex.split(by)
    except ValueError:
        words = []
    if not words:
        raise UserError(f"--by {by!r}: this is not a command; write it as  --by 'ssh -p 2222'")
    return words


def _wrap_for_node(start: Sequence[str], node: str, command: Sequence[str]) -> list[str]:
    """ssh hands its words to a shell on the other side."""
    return [*start, node, shlex.join(command)] if Path(start[0]).name == "ssh" else [*start, node, *command]


def _collect_answer(node: str, process: subprocess.Popen[str]) -> NodeAnswer:
    try:
        out, err = process.communicate(timeout=NODE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nnot done within {NODE_TIMEOUT_S:.0f} s"
    return NodeAnswer(node, process.returncode, out, err)


def _merge_answers(answers: Sequence[NodeAnswer], seconds: float, by: str = "ssh") -> Examination:
    """That of the first node; what others could not tell it is added."""
    found: list[CheckResult] = []
    hosts: Sequence[str] = [answer.host for answer in answers]
    for index, answer in enumerate(answers):
        if index and answer.code == 0 and not answer.out:
            continue  # told to the first
        try:
            values = json.loads(answer.out)
            told = [CheckResult(**{**one, "verdict": Health(one["verdict"])}) for one in values["findings"]]
            theirs = list(map(str, values["hosts"]))
        except (ValueError, KeyError, TypeError, RecursionError):  # of another version, or what a shell there prints
            why = next((line.strip() for line in reversed(answer.err.splitlines()) if line.strip()), "no answer")
            remedy = f"{by} {answer.host} {sys.executable} -m paceline --version"
            what = "an answer of the doctor there"
            found.append(
                CheckResult("nodes", "start", f"{answer.host}: {why}", what, Health.WRONG, remedy, answer.host)
            )
            continue
        found += told if index == 0 else [finding for finding in told if finding.verdict is Health.WRONG]
        hosts = theirs if index == 0 and len(theirs) == len(answers) else hosts
    return Examination(found, seconds, hosts)


RENDEZVOUS_TOPIC = "network"
RENDEZVOUS_S = 20.0
CONNECT_TRY_S = 3.0
"""For one attempt to connect."""
RETRY_S = 0.2


class RendezvousFailed(RunFailed):
    """The nodes cannot talk; `finding` says which, and why."""

    def __init__(self, finding: CheckResult) -> None:
        super().__init__(finding.found)
        self.finding = finding


@dataclass
class Rendezvous:
    """What one node tells and asks the others."""

    place: RankInfo
    store: Any
    hosts: list[str]
    """By node, in the order of ranks."""
    node: int | None
    """This one among them; None on ranks that are not the first of their host."""

    def tell(self, what: str, value: Any) -> None:
        self.store.set(f"{what}/{self.node}", json.dumps(value))

    def ask(self, what: str, node: int, within_s: float = RENDEZVOUS_S) -> Any:
        key = f"{what}/{node}"
        try:
            self.store.wait([key], timedelta(seconds=within_s))
            return json.loads(self.store.get(key))
        except RuntimeError:
            found = f"{self.hosts[node]} has not answered within {within_s:.0f} s ({what})"
            raise RendezvousFailed(
                CheckResult(RENDEZVOUS_TOPIC, "meeting", found, "an answer", Health.WRONG, host=self.hosts[node])
            ) from None

    def everyone(self, what: str, value: Any, within_s: float = RENDEZVOUS_S) -> list[Any]:
        """What each node tells, in their order; all have come so far when it returns."""
        self.tell(what, value)
        return [self.ask(what, node, within_s) for node in range(len(self.hosts))]

    def leave(self) -> None:
        """The main node has the store, and goes when nobody will ask any more."""
        self.tell("done", None)
        for node in range(len(self.hosts)) if self.node == 0 else ():
            self.ask("done", node)


def join_rendezvous(place: RankInfo) -> Rendezvous:
    """Join the others; NotMet where that cannot be."""
    if place.rank:
        _wait_for_rank_0(place)
    try:
        store = _open_store_in_thread(place)
        store.set(f"came/{place.rank}", json.dumps([socket.gethostname(), place.local_rank]))
        came = [f"came/{rank}" for rank in range(place.world)]
        missing = _find_missing(store, came)
    except (RuntimeError, OSError) as error:
        raise RendezvousFailed(_describe_store_error(place, error)) from None
    if missing:
        ranks = ", ".join(key.split("/")[1] for key in missing)
        found = (
            f"rank {ranks} of {place.world} has not come to {place.address}:{place.port} within {RENDEZVOUS_S:.0f} s"
        )
        remedy = f"start it; or, if it waits too, let  nc -vz {place.address} {place.port}  there say what is between"
        raise RendezvousFailed(
            CheckResult(RENDEZVOUS_TOPIC, "meeting", found, f"all {place.world} ranks", Health.WRONG, remedy)
        )
    everyone = [json.loads(store.get(key)) for key in came]
    firsts = [rank for rank, (_, local) in enumerate(everyone) if local == 0]
    hosts = _number_duplicates([everyone[rank][0] for rank in firsts])
    return Rendezvous(place, store, hosts, firsts.index(place.rank) if place.rank in firsts else None)


def _open_store_in_thread(place: RankInfo) -> Any:
    """On a thread of its own: torch waits for ever for one who takes a connection and says nothing."""
    import torch.distributed as dist  # before the clock runs

    made: list[Any] = []

    def make() -> None:
        try:
            made.append(_open_store(place, dist))
        except Exception as error:  # raised below, where it is waited for
            made.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(RENDEZVOUS_S + CONNECT_TRY_S)
    if not made:
        raise TimeoutError(
            f"connections are taken, and nothing is answered within {RENDEZVOUS_S + CONNECT_TRY_S:.0f} s"
        )
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _open_store(place: RankInfo, dist: Any) -> Any:
    """Where the ranks of a run would meet; it is there before the others are. torchrun has one of its own."""
    main = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    everyone = dist.TCPStore(
        place.address,
        place.port,
        is_master=main,
        timeout=timedelta(seconds=RENDEZVOUS_S),
        wait_for_workers=False,
        master_listen_fd=open_listener(place).detach() if main else None,
    )
    return dist.PrefixStore(f"doctor {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", everyone)


def _find_missing(store: Any, keys: list[str]) -> list[str]:
    try:
        store.wait(keys, timedelta(seconds=RENDEZVOUS_S))
    except RuntimeError:
        return [key for key in keys if not store.check([key])]
    return []


def _number_duplicates(names: list[str]) -> list[str]:
    """Nodes of one name, as in tests and containers, are numbered."""
    return [name if names.count(name) == 1 else f"{name}#{index}" for index, name in enumerate(names)]


def _wait_for_rank_0(place: RankInfo) -> None:
    """Rank 0 may come later; who never answers, and how, is the finding."""
    where, ends = f"{place.address}:{place.port}", time.monotonic() + RENDEZVOUS_S
    why, remedy = "", ""
    while time.monotonic() < ends:
        try:
            socket.create_connection((place.address, place.port), CONNECT_TRY_S).close()
            return
        except socket.gaierror as error:
            why, remedy = (
                f"{place.address} does not resolve ({error.strerror})",
                "use an address, or a line in /etc/hosts",
            )
        except ConnectionRefusedError:
            why, remedy = f"nobody listens at {where}", "is rank 0 started, with the same MASTER_ADDR and MASTER_PORT?"
        except TimeoutError:
            why, remedy = (
                f"no answer from {where}",
                f"a firewall drops it: open port {place.port}, or another is to be used",
            )
        except OSError as error:
            why, remedy = f"{where} cannot be reached: {error.strerror}", f"ip route get {place.address}"
        time.sleep(RETRY_S)
    expected = "rank 0 listens, and can be reached"
    raise RendezvousFailed(CheckResult(RENDEZVOUS_TOPIC, "port of rank 0", why, expected, Health.WRONG, remedy))


def _describe_store_error(place: RankInfo, error: Exception) -> CheckResult:
    why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = f"{place.address}:{place.port}"
    other, remedy = f"{where}: {why}", ""
    if "in use" in why.lower():
        other = f"{where} is taken"
        remedy = f"ss -ltnp 'sport = :{place.port}'  says by whom; another:  export MASTER_PORT={place.port + 1}"
    elif "ping failed" in why.lower():
        other = f"another program answers at {where}"
        remedy = (
            f"is MASTER_ADDR={place.address} the host of rank 0? another port:  export MASTER_PORT={place.port + 1}"
        )
    return CheckResult(RENDEZVOUS_TOPIC, "port of rank 0", other, "free for rank 0", Health.WRONG, remedy)
