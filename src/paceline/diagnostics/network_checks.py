"""Check the network: names, interfaces, ports and variables, and the links and clocks between nodes.

Disjoint pairs of nodes are measured at the same time, in rounds, as in a tournament. The paths between them are
unknown: a slow pair that is fast alone shares its path with another.
"""

import errno
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from paceline.diagnostics.nodes import Rendezvous
from paceline.diagnostics.results import ALL_NODES, CheckContext, CheckResult, Health
from paceline.io.format import duration, number
from paceline.launch import network
from paceline.launch.environment import DEFAULT_PORT

SLOWING_VARIABLES = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "INFO",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}
MAX_ROUNDS = 12
CONNECT_S = 5.0
SENT_S, SKIPPED_S = 0.25, 0.08
"""The start is skipped: a connection starts slowly, and shaped links let a burst pass."""
PAIR_TRIES = 2
BLOCK_BYTES = 1 << 18
PINGS = 8
TOO_SLOW, SLOW = 0.2, 0.5
BEHIND_OTHERS = 0.5
APART_S, FAR_APART_S = 0.1, 2.0
_result = partial(CheckResult, "network")


def check_own_name(context: CheckContext) -> Iterator[CheckResult]:
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        remedy = f"an entry for {host} in /etc/hosts; on one machine it does not matter"
        yield _result("own name", f"{host} does not resolve: {error.strerror}", "an address", Health.LOOK, remedy)
        return
    yield _result("own name", f"{host} is {address}", "an address")


def check_interface(context: CheckContext) -> Iterator[CheckResult]:
    """Find the interface that leads to rank 0, and variables that name one that does not exist."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in (network.GLOO, network.NCCL):
        for wanted in context.environ.get(variable, "").lstrip("=").split(","):
            if wanted and not wanted.startswith("^") and not any(name.startswith(wanted) for name in names):
                found = f"{variable}={wanted}, which this machine does not have"
                yield _result("interface", found, ", ".join(names), Health.WRONG, f"unset {variable}")
    address = "" if context.rank_info.on_one_machine else context.rank_info.address
    own = network.find_local_address(address) if address else None
    if address and own is None:
        remedy = f"getent hosts {address};  ip route get {address}"
        yield _result("interface", f"no route to rank 0 at {address}", "a route", Health.WRONG, remedy)
        return
    found = f"{network.find_interface(own) or '?'} with {own} leads to rank 0" if own else ", ".join(names)
    verdict = Health.OK if any(name != network.LOOPBACK for name in names) else Health.NOT_HERE
    yield _result("interface", found, verdict=verdict)


def check_port(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the port of rank 0 is free, unless a launcher has opened it already."""
    if context.rank_info.world > 1:
        return
    given = context.environ.get("MASTER_PORT", "")
    port = int(given) if given.isdecimal() and 0 < int(given) < 65536 else DEFAULT_PORT
    taken = _is_taken(port)
    default = "" if given else ", the default of launchers"
    verdict = Health.OK if not taken else Health.WRONG if given else Health.LOOK
    remedy = f"ss -ltnp 'sport = :{port}'  shows by whom; another:  export MASTER_PORT={port + 1}"
    yield _result("port", f"{port} is {'taken' if taken else 'free'}{default}", "free", verdict, remedy)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def check_infiniband(context: CheckContext) -> Iterator[CheckResult]:
    ports = sorted(network.INFINIBAND.glob("*/ports/*"))
    if not ports:
        yield _result("InfiniBand", "no card", verdict=Health.NOT_HERE)
        return
    active, rates = network.list_active_infiniband(), set()
    for port in ports:
        with suppress(OSError):
            rates.add((port / "rate").read_text().strip())
    found = f"{len(active)} of {len(ports)} ports up, {', '.join(sorted(rates))}"
    remedy = "ibstat  shows why a port is down"
    down = len(active) < len(ports)
    direct = any(Path("/sys/module", module).exists() for module in ("nvidia_peermem", "nv_peer_mem"))
    if not down and not direct:
        found, remedy = f"{found}; devices cannot send by themselves", "modprobe nvidia_peermem"
    verdict = Health.WRONG if not active else Health.LOOK if down or not direct else Health.OK
    yield _result("InfiniBand", found, "all ports up, nvidia_peermem loaded", verdict, remedy)


def check_variables(context: CheckContext) -> Iterator[CheckResult]:
    names = [name for name, value in SLOWING_VARIABLES.items() if context.environ.get(name, "").upper() == value]
    found = ", ".join(f"{name}={SLOWING_VARIABLES[name]}" for name in names) or "none that slow a run"
    verdict = Health.LOOK if names else Health.OK
    yield _result("variables", found, "none that slow a run", verdict, f"unset {' '.join(names)}")


@dataclass(frozen=True)
class NodeAddress:
    host: str
    port: int
    link_bits_s: float | None
    own_bits_s: float
    """Through the loopback, by the same program."""


@dataclass(frozen=True)
class PairRate:
    """What node a received from node b."""

    a: int
    b: int
    bits_s: float
    round_trip_s: float
    ahead_s: float
    """Of b's clock before a's."""
    why_not: str = ""


def check_links(rendezvous: Rendezvous) -> list[CheckResult]:
    """Measure every pair of nodes; the results are returned on the main node."""
    node = rendezvous.node
    with socket.create_server(("", 0), backlog=16) as server:
        mine = _describe_own_address(rendezvous, server.getsockname()[1])
        addresses = [NodeAddress(**known) for known in rendezvous.gather("address", asdict(mine))]
        found: list[PairRate] = []
        for index, pairs in enumerate(schedule_pairs(len(addresses))[:MAX_ROUNDS]):
            for a, b in (way for pair in pairs for way in (pair, pair[::-1])):
                if node == a:
                    found.append(_measure_pair(a, b, addresses[b]))
                elif node == b:
                    _serve_pair(server)
            rendezvous.gather(f"round {index}", None)
    gathered = rendezvous.gather("pairs", [asdict(pair) for pair in found])
    rates = [PairRate(**pair) for some in gathered for pair in some]
    if node:
        return []
    return [*judge_pairs(rates, addresses, rendezvous.hosts), *check_clocks(rates, rendezvous.hosts)]


def schedule_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds with every two nodes once, and each node at most once in a round."""
    players: list[int | None] = [*range(nodes), *([None] * (nodes % 2))]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        met = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def judge_pairs(pairs: Sequence[PairRate], addresses: Sequence[NodeAddress], hosts: Sequence[str]) -> list[CheckResult]:
    """Return a result for each slow or closed pair, or one for all of them."""
    fine = [pair for pair in pairs if not pair.why_not]
    rates = sorted(pair.bits_s for pair in fine)
    median = statistics.median(rates) if fine else 0.0
    found: list[CheckResult] = []
    for pair in pairs:
        who = f"{hosts[pair.b]} to {hosts[pair.a]}"
        if pair.why_not:
            remedy = "open all ports between nodes: ranks use other ones each time"
            found.append(_result("ports", f"{who}: {pair.why_not}", "open between nodes", Health.WRONG, remedy, who))
            continue
        ends = [addresses[pair.a], addresses[pair.b]]
        links = [end.link_bits_s for end in ends if end.link_bits_s]
        most = min([*links, *(end.own_bits_s for end in ends)])
        behind = len(fine) > 2 and pair.bits_s < BEHIND_OTHERS * median
        if pair.bits_s < SLOW * most or behind:
            reason = f"a link of {_format_rate(min(links))}" if links else f"{_format_rate(most)} within a node"
            expected = f"about {_format_rate(most)}, by {reason}"
            expected += f"; the median of all pairs is {_format_rate(median)}" if behind else ""
            verdict = Health.WRONG if behind or pair.bits_s < TOO_SLOW * most else Health.LOOK
            remedy = f"ethtool and ip -s link on both; another interface:  export {network.GLOO}=… {network.NCCL}=…"
            found.append(_result("link", f"{who}: {_format_rate(pair.bits_s)}", expected, verdict, remedy, who))
    if fine and not found:
        trip_s = statistics.median(pair.round_trip_s for pair in fine)
        between = " to ".join(map(_format_rate, (rates[0], rates[-1])))
        shown = f"{between}, {duration(trip_s)} there and back"
        found.append(_result("links", shown, "the speed of the cards", host=ALL_NODES))
    return found


def check_clocks(pairs: Sequence[PairRate], hosts: Sequence[str]) -> Iterator[CheckResult]:
    """Compare clocks with that of the main node: logs, file times and certificates need them to agree."""
    ahead = {pair.b: pair.ahead_s for pair in pairs if pair.a == 0 and not pair.why_not}
    off = {node: ahead_s for node, ahead_s in ahead.items() if abs(ahead_s) > APART_S}
    for node, ahead_s in off.items():
        verdict = Health.WRONG if abs(ahead_s) > FAR_APART_S else Health.LOOK
        found = f"{hosts[node]} is {duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} {hosts[0]}"
        yield _result("clocks", found, "the same time", verdict, "chronyc makestep  there", hosts[node])
    if ahead and not off:
        found = f"at most {duration(max(map(abs, ahead.values())))} apart"
        yield _result("clocks", found, f"under {duration(APART_S)}", host=ALL_NODES)


def _format_rate(bits_s: float) -> str:
    return f"{number(bits_s / 1e9, 3)} Gbit/s" if bits_s >= 1e9 else f"{number(bits_s / 1e6, 3)} Mbit/s"


def _describe_own_address(rendezvous: Rendezvous, port: int) -> NodeAddress:
    shared = rendezvous.rank_info.address
    own = network.find_local_address(shared)
    card = psutil.net_if_stats().get(network.find_interface(own)) if own else None
    link_bits_s = card.speed * 1e6 if card and card.speed > 0 else None
    host = shared if rendezvous.node == 0 else own or shared
    return NodeAddress(host, port, link_bits_s, measure_loopback_bits_s())


def measure_loopback_bits_s() -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with suppress(OSError), socket.create_connection(server.getsockname(), CONNECT_S) as connection:
                _send_until_closed(connection)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            rate = _receive_bits_s(connection)
        sender.join(CONNECT_S)
    return rate


def _measure_pair(a: int, b: int, peer: NodeAddress) -> PairRate:
    """Measure clock offset and bandwidth to a peer; the best of a few tries counts: other programs slow them down."""
    rates: list[float] = []
    trips: list[tuple[float, float]] = []
    try:
        for _ in range(PAIR_TRIES):
            with socket.create_connection((peer.host, peer.port), CONNECT_S) as connection:
                trips += _measure_clock_offsets(connection)
                rates.append(_receive_bits_s(connection))
    except (OSError, struct.error) as error:  # the other end hung up
        reason = getattr(error, "strerror", None) or "no answer"
        return PairRate(a, b, 0.0, 0.0, 0.0, f"{reason} at {peer.host}:{peer.port}")
    trip_s, ahead_s = min(trips)
    return PairRate(a, b, max(rates), trip_s, ahead_s)


def _serve_pair(server: socket.socket) -> None:
    server.settimeout(CONNECT_S + SENT_S)
    with suppress(OSError):  # nothing gets through: the other end tells
        for _ in range(PAIR_TRIES):
            connection, _ = server.accept()
            with connection:
                connection.settimeout(CONNECT_S)
                for _ in range(PINGS):
                    connection.recv(1)
                    connection.sendall(struct.pack("!d", time.time()))
                _send_until_closed(connection)


def _measure_clock_offsets(connection: socket.socket) -> Iterator[tuple[float, float]]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection.makefile("rb") as answers:
        for _ in range(PINGS):
            before = time.time()
            connection.sendall(b"?")
            (their_time,) = struct.unpack("!d", answers.read(8))
            after = time.time()
            yield after - before, their_time - (before + after) / 2


def _send_until_closed(connection: socket.socket) -> None:
    block, end_s = bytes(BLOCK_BYTES), time.monotonic() + CONNECT_S
    with suppress(OSError):
        while time.monotonic() < end_s:
            connection.sendall(block)


def _receive_bits_s(connection: socket.socket) -> float:
    buffer = bytearray(BLOCK_BYTES)
    connection.settimeout(CONNECT_S)
    start_s = counted_from_s = time.perf_counter()
    counted = 0
    while (now_s := time.perf_counter()) - start_s < SENT_S:
        if now_s - start_s < SKIPPED_S:
            counted_from_s, counted = now_s, 0
        counted += connection.recv_into(buffer)
    return 8 * counted / (time.perf_counter() - counted_from_s)
