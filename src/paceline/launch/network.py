"""Where the ranks listen and which network they use: no more of it than they need, and never against the user's word.

On one machine everything stays on the loopback. On several, the main rank listens at the address by which the others
reach it, and every rank sends through the interface that leads there: what gloo and NCCL would choose by themselves
may be a bridge of containers, or the loopback where the machine's own name stands for it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch.environment import RankInfo

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "lo"
INFINIBAND = Path("/sys/class/infiniband")
BACKLOG = 2048
PROBE_PORT = 9
"""Nothing is sent to it."""


@dataclass(frozen=True)
class NetworkSetting:
    """A variable that a library reads when the ranks join."""

    name: str
    value: str
    reason: str
    ours: bool
    """False where the user has set it."""

    def __str__(self) -> str:
        return f"{self.name}={self.value}  ({self.reason})"


def choose_network_settings(place: RankInfo, environ: Mapping[str, str], cuda: bool) -> list[NetworkSetting]:
    """What gloo and, between CUDA devices, NCCL are told, and why."""
    found = []
    interface, reason = _choose_interface(place)
    for name in (GLOO, NCCL) if cuda and place.local_world < place.world else (GLOO,):
        if environ.get(name):
            found.append(NetworkSetting(name, environ[name], "as it was set", ours=False))
        elif interface:
            found.append(NetworkSetting(name, interface, reason, ours=True))
    return found


def apply_network_settings(chosen: list[NetworkSetting]) -> None:
    """Gloo would say of an interface that is not there that a pointer is null."""
    there = {name for _, name in socket.if_nameindex()}
    for setting in chosen:
        if setting.name == GLOO and not setting.ours and not there & set(setting.value.split(",")):
            raise UserError(
                f"{setting.name}={setting.value}, which {socket.gethostname()} does not have; type  unset {GLOO},  or "
                f"name one of {', '.join(sorted(there))}"
            )
    os.environ.update({setting.name: setting.value for setting in chosen if setting.ours})


def list_active_infiniband(folder: Path = INFINIBAND) -> list[str]:
    """The ports of InfiniBand or RoCE that are up. NCCL finds them by itself."""
    found = []
    for state in sorted(folder.glob("*/ports/*/state")):
        with suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.append(f"{state.parents[2].name}:{state.parent.name}")
    return found


def _choose_interface(place: RankInfo) -> tuple[str, str]:
    """(its name, why this one); no name where there is nothing to say."""
    if place.local_world == place.world:
        names = {name for _, name in socket.if_nameindex()}
        return (LOOPBACK, "all ranks are on this machine") if LOOPBACK in names else ("", "")
    own = find_local_address(place.address)
    if own is None or ipaddress.ip_address(own).is_loopback:
        return "", ""
    return find_interface(own), f"leads to rank 0 at {place.address}"


def find_local_address(host: str) -> str | None:
    """This machine's address on the way to another; None where there is none."""
    for family, kind, *_, address in _resolve_host(host, socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


def find_interface(address: str) -> str:
    """The name of the interface with this address; empty where none has it."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return ""


def open_listener(place: RankInfo) -> socket.socket:
    """The main rank's socket for the others: at the address that they were given, and at no other.

    Where that is a name which stands for the loopback on this machine alone, as Debian writes it into /etc/hosts, the
    others know another address by it: only then all interfaces are listened on.
    """
    several = place.local_world < place.world
    last = OSError(f"{place.address} is no address of this machine")
    for family, kind, protocol, _, address in _resolve_host(place.address, socket.SOCK_STREAM):
        host = str(address[0])
        if several and ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            host = "::" if family == socket.AF_INET6 else ""
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, place.port))
            found.listen(BACKLOG)
            return found
        except OSError as error:
            found.close()
            last = error
    raise last


@contextmanager
def restrict_to_loopback(place: RankInfo) -> Iterator[None]:
    """Where all ranks are on this machine, what a library opens in here to all interfaces is open to the loopback
    alone from then on. Before version 5.7, Linux wants a privilege for that, and it stays as the library has it."""
    before = _wildcard_listeners()
    yield
    for number in _wildcard_listeners() - before if place.local_world == place.world else ():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK.encode())


def _wildcard_listeners() -> set[int]:
    """This process's sockets that listen on all interfaces."""
    import psutil

    opened = psutil.Process().net_connections("tcp")
    return {one.fd for one in opened if one.status == psutil.CONN_LISTEN and one.laddr.ip in ("0.0.0.0", "::")}


def wait_for_main_rank(place: RankInfo, timeout_s: float) -> None:
    """Wait until the main rank listens. torch would too, and print a page for every name that is not known yet."""
    deadline, pause_s, last = time.monotonic() + timeout_s, 0.01, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((place.address, place.port), timeout=left).close()
            return
        except OSError as error:
            last = error.strerror or str(error)
        time.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, 0.5)
    raise RuntimeError(f"timed out after {timeout_s:g} s: {last or 'no answer'}")


def _resolve_host(host: str, kind: socket.SocketKind) -> list[Any]:
    """As `socket.getaddrinfo` has it; nothing for a name that nobody knows."""
    try:
        return socket.getaddrinfo(host, PROBE_PORT, type=kind)
    except OSError:
        return []
