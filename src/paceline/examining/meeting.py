"""Nodes that look at each other: they meet where the ranks of a run would, and tell each other what they found.

Whoever does not come, or cannot be reached, is named. No process group is made: where one could not be, this still says
why.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from paceline.errors import RunFailed
from paceline.examining.results import CheckResult, Health
from paceline.launch.environment import Place
from paceline.launch.network import listening

TOPIC = "network"
MEET_S = 20.0
TRY_S = 3.0
"""For one attempt to connect."""
AGAIN_S = 0.2


class NotMet(RunFailed):
    """The nodes cannot talk; `finding` says which, and why."""

    def __init__(self, finding: CheckResult) -> None:
        super().__init__(finding.found)
        self.finding = finding


@dataclass
class Meeting:
    """What one node tells and asks the others."""

    place: Place
    store: Any
    hosts: list[str]
    """By node, in the order of ranks."""
    node: int | None
    """This one among them; None on ranks that are not the first of their host."""

    def tell(self, what: str, value: Any) -> None:
        self.store.set(f"{what}/{self.node}", json.dumps(value))

    def ask(self, what: str, node: int, within_s: float = MEET_S) -> Any:
        key = f"{what}/{node}"
        try:
            self.store.wait([key], timedelta(seconds=within_s))
            return json.loads(self.store.get(key))
        except RuntimeError:
            found = f"{self.hosts[node]} has not answered within {within_s:.0f} s ({what})"
            raise NotMet(
                CheckResult(TOPIC, "meeting", found, "an answer", Health.WRONG, host=self.hosts[node])
            ) from None

    def everyone(self, what: str, value: Any, within_s: float = MEET_S) -> list[Any]:
        """What each node tells, in their order; all have come so far when it returns."""
        self.tell(what, value)
        return [self.ask(what, node, within_s) for node in range(len(self.hosts))]

    def leave(self) -> None:
        """The main node has the store, and goes when nobody will ask any more."""
        self.tell("done", None)
        for node in range(len(self.hosts)) if self.node == 0 else ():
            self.ask("done", node)


def meet(place: Place) -> Meeting:
    """Join the others; NotMet where that cannot be."""
    if place.rank:
        _reach(place)
    try:
        store = _store(place)
        store.set(f"came/{place.rank}", json.dumps([socket.gethostname(), place.local_rank]))
        came = [f"came/{rank}" for rank in range(place.world)]
        missing = _missing(store, came)
    except (RuntimeError, OSError) as error:
        raise NotMet(_no_store(place, error)) from None
    if missing:
        ranks = ", ".join(key.split("/")[1] for key in missing)
        found = f"rank {ranks} of {place.world} has not come to {place.address}:{place.port} within {MEET_S:.0f} s"
        remedy = f"start it; or, if it waits too, let  nc -vz {place.address} {place.port}  there say what is between"
        raise NotMet(CheckResult(TOPIC, "meeting", found, f"all {place.world} ranks", Health.WRONG, remedy))
    everyone = [json.loads(store.get(key)) for key in came]
    firsts = [rank for rank, (_, local) in enumerate(everyone) if local == 0]
    hosts = _told_apart([everyone[rank][0] for rank in firsts])
    return Meeting(place, store, hosts, firsts.index(place.rank) if place.rank in firsts else None)


def _store(place: Place) -> Any:
    """On a thread of its own: torch waits for ever for one who takes a connection and says nothing."""
    import torch.distributed as dist  # before the clock runs

    made: list[Any] = []

    def make() -> None:
        try:
            made.append(_opened(place, dist))
        except Exception as error:  # raised below, where it is waited for
            made.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(MEET_S + TRY_S)
    if not made:
        raise TimeoutError(f"connections are taken, and nothing is answered within {MEET_S + TRY_S:.0f} s")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _opened(place: Place, dist: Any) -> Any:
    """Where the ranks of a run would meet; it is there before the others are. torchrun has one of its own."""
    main = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    everyone = dist.TCPStore(
        place.address,
        place.port,
        is_master=main,
        timeout=timedelta(seconds=MEET_S),
        wait_for_workers=False,
        master_listen_fd=listening(place).detach() if main else None,
    )
    return dist.PrefixStore(f"doctor {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", everyone)


def _missing(store: Any, keys: list[str]) -> list[str]:
    try:
        store.wait(keys, timedelta(seconds=MEET_S))
    except RuntimeError:
        return [key for key in keys if not store.check([key])]
    return []


def _told_apart(names: list[str]) -> list[str]:
    """Nodes of one name, as in tests and containers, are numbered."""
    return [name if names.count(name) == 1 else f"{name}#{index}" for index, name in enumerate(names)]


def _reach(place: Place) -> None:
    """Rank 0 may come later; who never answers, and how, is the finding."""
    where, ends = f"{place.address}:{place.port}", time.monotonic() + MEET_S
    why, remedy = "", ""
    while time.monotonic() < ends:
        try:
            socket.create_connection((place.address, place.port), TRY_S).close()
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
        time.sleep(AGAIN_S)
    expected = "rank 0 listens, and can be reached"
    raise NotMet(CheckResult(TOPIC, "port of rank 0", why, expected, Health.WRONG, remedy))


def _no_store(place: Place, error: Exception) -> CheckResult:
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
    return CheckResult(TOPIC, "port of rank 0", other, "free for rank 0", Health.WRONG, remedy)
