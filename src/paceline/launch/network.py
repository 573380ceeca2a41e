"""Choose where the ranks listen and which network interface they use; what the user has set is kept.

On one machine everything stays on the loopback. On several, the main rank listens at the address that the others were
given, and every rank uses the interface that leads there: the default of gloo and NCCL may be a container bridge.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
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
"""Nothing is sent to it: connecting a UDP socket only looks up the route."""


@dataclass(frozen=True)
class NetworkSetting:
    name: str
    value: str
    reason: str
    ours: bool

    def __str__(self) -> str:
        return f"{self.name}={self.value}  ({self.reason})"


def choose_network_settings(info: RankInfo, environ: Mapping[str, str], cuda: bool) -> list[NetworkSetting]:
    """Return the interface settings for gloo and, between CUDA devices of several machines, NCCL."""
    found = []
    interface, reason = _choose_interface(info)
    for name in (GLOO, NCCL) if cuda and not info.on_one_machine else (GLOO,):
        if environ.get(name):
            found.append(NetworkSetting(name, environ[name], "as it was set", ours=False))
        elif interface:
            found.append(NetworkSetting(name, interface, reason, ours=True))
    return found


def apply_network_settings(chosen: list[NetworkSetting]) -> None:
    """Set the variables; reject an unknown interface, for which gloo would only report a null pointer."""
    existing = {name for _, name in socket.if_nameindex()}
    for setting in chosen:
        if setting.name == GLOO and not setting.ours and not existing & set(setting.value.split(",")):
            message = f"{GLOO}={setting.value}, which {socket.gethostname()} does not have; type  unset {GLOO},"
            raise UserError(f"{message}  or name one of {', '.join(sorted(existing))}", code="unavailable", key=GLOO)
    os.environ.update({setting.name: setting.value for setting in chosen if setting.ours})


def list_active_infiniband(folder: Path = INFINIBAND) -> list[str]:
    """Return the active ports of InfiniBand or RoCE, which NCCL finds itself."""
    states = [state for state in sorted(folder.glob("*/ports/*/state")) if "ACTIVE" in state.read_text()]
    return [f"{state.parents[2].name}:{state.parent.name}" for state in states]


def _choose_interface(info: RankInfo) -> tuple[str, str]:
    """Return (name, reason) of the interface to use; ("", "") to leave it to the libraries."""
    if info.on_one_machine:
        names = {name for _, name in socket.if_nameindex()}
        return (LOOPBACK, "all ranks are on this machine") if LOOPBACK in names else ("", "")
    own = find_local_address(info.address)
    if own is None or ipaddress.ip_address(own).is_loopback:
        return "", ""
    return find_interface(own), f"leads to rank 0 at {info.address}"


def find_local_address(host: str) -> str | None:
    """Return this machine's address on the route to another host; None without a route."""
    for family, kind, *_, address in _resolve_host(host, socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


def find_interface(address: str) -> str:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return str(name)
    return ""


def open_listener(info: RankInfo) -> socket.socket:
    """Open the main rank's listening socket, at the address that the other ranks were given and no other.

    If that name is the loopback here, as Debian writes it into /etc/hosts, it listens on all interfaces.
    """
    last = OSError(f"{info.address} is not an address of this machine")
    for family, kind, protocol, _, address in _resolve_host(info.address, socket.SOCK_STREAM):
        host = str(address[0])
        if not info.on_one_machine and ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            host = "::" if family == socket.AF_INET6 else ""
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, info.port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            last = error
    raise last


def wait_for_main_rank(info: RankInfo, timeout_s: float) -> None:
    """Wait until the main rank listens; torch would print a page for every host name that does not resolve yet."""
    deadline, pause_s, last = time.monotonic() + timeout_s, 0.01, ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((info.address, info.port), timeout=left).close()
            return
        except OSError as error:
            last = error.strerror or str(error)
        time.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, 0.5)
    raise RuntimeError(f"timed out after {timeout_s:g} s: {last or 'no answer'}")


def _resolve_host(host: str, kind: socket.SocketKind) -> list[Any]:
    try:
        return socket.getaddrinfo(host, PROBE_PORT, type=kind)
    except OSError:
        return []
