"""Names, interfaces, ports and variables: what ranks need to find each other."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.diagnostics.results import CheckContext, CheckResult, Health
from paceline.launch.environment import DEFAULT_PORT
from paceline.launch.network import (
    GLOO,
    INFINIBAND,
    LOOPBACK,
    NCCL,
    find_interface,
    find_local_address,
    list_active_infiniband,
)

NETWORK_TOPIC = "network"
SLOWING_VARIABLES = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "INFO",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
"""Variables that help to look for a fault, and cost speed when they stay."""


def check_own_name(here: CheckContext) -> Iterator[CheckResult]:
    """Whether this machine's own name leads anywhere."""
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        yield CheckResult(
            *(NETWORK_TOPIC, "own name", f"{host} does not resolve: {error.strerror}", "an address"),
            *(Health.LOOK, f"an entry for {host} in /etc/hosts; on one machine it does not matter"),
        )
        return
    yield CheckResult(NETWORK_TOPIC, "own name", f"{host} is {address}", "an address")


def check_interface(here: CheckContext) -> Iterator[CheckResult]:
    """Which way messages would go, and whether variables name one that is there."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in (GLOO, NCCL):
        for asked in here.environ.get(variable, "").lstrip("=").split(","):
            if asked and not asked.startswith("^") and not any(name.startswith(asked) for name in names):
                yield CheckResult(
                    *(
                        NETWORK_TOPIC,
                        "interface",
                        f"{variable}={asked}, which this machine does not have",
                        ", ".join(names),
                    ),
                    *(Health.WRONG, f"unset {variable}"),
                )
    towards = here.place.address if here.place.world > here.place.local_world else ""
    own = find_local_address(towards) if towards else None
    if towards and own is None:
        yield CheckResult(
            *(NETWORK_TOPIC, "interface", f"no way to rank 0 at {towards}", "a route"),
            *(Health.WRONG, f"getent hosts {towards};  ip route get {towards}"),
        )
        return
    said = f"{find_interface(own or '') or '?'} with {own} leads to rank 0" if own else ", ".join(names)
    alone = not any(name != LOOPBACK for name in names)
    yield CheckResult(NETWORK_TOPIC, "interface", said, "", Health.NOT_HERE if alone else Health.OK)


def check_port(here: CheckContext) -> Iterator[CheckResult]:
    """Of rank 0, where a launcher has not opened it already."""
    if here.place.world > 1:
        return
    given = here.environ.get("MASTER_PORT", "")
    wanted = int(given) if given.isdecimal() and 0 < int(given) < 65536 else DEFAULT_PORT
    taken = _is_taken(wanted)
    usual = "" if given else ", which launchers take unless they are told another"
    yield CheckResult(
        *(NETWORK_TOPIC, "port", f"{wanted} is {'taken' if taken else 'free'}{usual}", "free"),
        Health.OK if not taken else Health.WRONG if given else Health.LOOK,
        f"ss -ltnp 'sport = :{wanted}'  says by whom; another:  export MASTER_PORT={wanted + 1}",
    )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def check_infiniband(here: CheckContext) -> Iterator[CheckResult]:
    ports = sorted(INFINIBAND.glob("*/ports/*"))
    if not ports:
        yield CheckResult(NETWORK_TOPIC, "InfiniBand", "no card", "", Health.NOT_HERE)
        return
    up = list_active_infiniband()
    rates = {_read_text(port / "rate") for port in ports} - {""}
    down = len(ports) - len(up)
    direct = any(Path("/sys/module", module).exists() for module in ("nvidia_peermem", "nv_peer_mem"))
    found = f"{len(up)} of {len(ports)} ports up, {', '.join(sorted(rates))}"
    remedy = "ibstat  says why a port is down"
    if not down and not direct:
        found, remedy = f"{found}; devices cannot send by themselves", "modprobe nvidia_peermem"
    verdict = Health.WRONG if not up else Health.LOOK if down or not direct else Health.OK
    yield CheckResult(NETWORK_TOPIC, "InfiniBand", found, "all ports up, nvidia_peermem loaded", verdict, remedy)


def check_variables(here: CheckContext) -> Iterator[CheckResult]:
    left = [
        f"{name}={value}" for name, value in SLOWING_VARIABLES.items() if here.environ.get(name, "").upper() == value
    ]
    remedy = f"unset {' '.join(word.split('=')[0] for word in left)}"
    yield CheckResult(
        *(NETWORK_TOPIC, "variables", ", ".join(left) or "none that slow a run", "none that slow a run"),
        *(Health.LOOK if left else Health.OK, remedy),
    )


def read_link_bits_s(interface: str) -> float | None:
    """What a network card says of its link; None where it does not say."""
    with suppress(OSError, ValueError):
        speed = int(Path("/sys/class/net", interface, "speed").read_text())
        return speed * 1e6 if speed > 0 else None
    return None


def _read_text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
