"""What lies between nodes: how fast each pair of them exchanges bytes over TCP, and how far their clocks are apart.

Disjoint pairs measure at the same time, in rounds, as in a tournament; nothing is known of the paths between them, so
a slow pair that is fast alone shares its path with another.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from paceline.diagnostics.network_checks import read_link_bits_s
from paceline.diagnostics.nodes import Rendezvous
from paceline.diagnostics.results import ALL_NODES, CheckResult, Health
from paceline.io.format import duration, number
from paceline.launch.network import find_interface, find_local_address

LINKS_TOPIC = "network"
MAX_ROUNDS = 12
CONNECT_S = 5.0
SENT_S = 0.25
SKIPPED_S = 0.08
"""At the beginning: a connection starts slowly, and shaped links let a burst pass."""
TRIES = 2
BLOCK_BYTES = 1 << 18
PINGS = 8
TOO_SLOW, SLOW = 0.2, 0.5
"""Of the slower of the link and what this machine's own TCP can do."""
BEHIND_OTHERS = 0.5
"""Of the median of the pairs."""
APART_S, FAR_APART_S = 0.1, 2.0


@dataclass(frozen=True)
class NodeAddress:
    """Where a node listens, and what it says of its link."""

    host: str
    port: int
    token: str
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


def check_links(meeting: Rendezvous) -> list[CheckResult]:
    """On the main node; the others take part and find nothing."""
    assert meeting.node is not None
    with socket.create_server(("", 0), backlog=16) as server:
        mine = _describe_own_address(meeting, server.getsockname()[1])
        addresses = [NodeAddress(**known) for known in meeting.everyone("address", asdict(mine))]
        found: list[PairRate] = []
        for index, pairs in enumerate(schedule_pairs(len(addresses))[:MAX_ROUNDS]):
            for a, b in (way for pair in pairs for way in (pair, pair[::-1])):
                if meeting.node == a:
                    found.append(_measure_pair(a, b, addresses[b]))
                elif meeting.node == b:
                    _serve_pair(server, mine.token)
            meeting.everyone(f"round {index}", None)
    everyone = meeting.everyone("pairs", [asdict(pair) for pair in found])
    all_of_them = [PairRate(**pair) for some in everyone for pair in some]
    if meeting.node:
        return []
    return [*judge_pairs(all_of_them, addresses, meeting.hosts), *check_clocks(all_of_them, meeting.hosts)]


def schedule_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Every two nodes once, each node at most once in a round."""
    players: list[int | None] = [*range(nodes), *([None] * (nodes % 2))]
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        met = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return found


def judge_pairs(
    pairs: Sequence[PairRate], addresses: Sequence[NodeAddress], hosts: Sequence[str]
) -> Iterator[CheckResult]:
    """Each pair that is slow or closed, or all of them in a line."""
    fine = [pair for pair in pairs if not pair.why_not]
    median = statistics.median(pair.bits_s for pair in fine) if fine else 0.0
    slow = False
    for pair in pairs:
        who = f"{hosts[pair.b]} to {hosts[pair.a]}"
        if pair.why_not:
            slow = True
            remedy = "open all ports between nodes: those that ranks use are given out anew each time"
            yield CheckResult(
                LINKS_TOPIC, "ports", f"{who}: {pair.why_not}", "open between nodes", Health.WRONG, remedy, who
            )
            continue
        ends = [addresses[pair.a], addresses[pair.b]]
        links = [end.link_bits_s for end in ends if end.link_bits_s]
        most = min([*links, *(end.own_bits_s for end in ends)])
        behind = len(fine) > 2 and pair.bits_s < BEHIND_OTHERS * median
        if pair.bits_s < SLOW * most or behind:
            slow = True
            of = f"a link of {_format_rate(min(links))}" if links else f"{_format_rate(most)} within a node"
            others = f"; the median of all pairs is {_format_rate(median)}" if behind else ""
            yield CheckResult(
                *(
                    LINKS_TOPIC,
                    "link",
                    f"{who}: {_format_rate(pair.bits_s)}",
                    f"about {_format_rate(most)}, by {of}{others}",
                ),
                Health.WRONG if behind or pair.bits_s < TOO_SLOW * most else Health.LOOK,
                "ethtool and ip -s link on both; another interface:  export GLOO_SOCKET_IFNAME=… NCCL_SOCKET_IFNAME=…",
                who,
            )
    if fine and not slow:
        rates = sorted(pair.bits_s for pair in fine)
        trips = statistics.median(pair.round_trip_s for pair in fine)
        said = _format_rate(rates[0]) if len(rates) == 1 else f"{_format_rate(rates[0])} to {_format_rate(rates[-1])}"
        yield CheckResult(
            LINKS_TOPIC, "links", f"{said}, {duration(trips)} there and back", "what the cards say", host=ALL_NODES
        )


def check_clocks(pairs: Sequence[PairRate], hosts: Sequence[str]) -> Iterator[CheckResult]:
    """Against the main node's: logs, file times and certificates need them together."""
    apart = {pair.b: pair.ahead_s for pair in pairs if pair.a == 0 and not pair.why_not}
    for node, ahead_s in apart.items():
        if abs(ahead_s) > APART_S:
            verdict = Health.WRONG if abs(ahead_s) > FAR_APART_S else Health.LOOK
            word = "ahead of" if ahead_s > 0 else "behind"
            found = f"{hosts[node]} is {duration(abs(ahead_s))} {word} {hosts[0]}"
            yield CheckResult(
                LINKS_TOPIC, "clocks", found, "the same time", verdict, "chronyc makestep  there", hosts[node]
            )
    if apart and all(abs(ahead_s) <= APART_S for ahead_s in apart.values()):
        most = max(map(abs, apart.values()))
        yield CheckResult(
            LINKS_TOPIC, "clocks", f"at most {duration(most)} apart", f"under {duration(APART_S)}", host=ALL_NODES
        )


def _format_rate(bits_s: float) -> str:
    return f"{number(bits_s / 1e9, 3)} Gbit/s" if bits_s >= 1e9 else f"{number(bits_s / 1e6, 3)} Mbit/s"


def _describe_own_address(meeting: Rendezvous, port: int) -> NodeAddress:
    """The main node is known to the others by the address at which they met."""
    met, own = meeting.place.address, find_local_address(meeting.place.address)
    link = read_link_bits_s(find_interface(own)) if own else None
    return NodeAddress(
        met if meeting.node == 0 else own or met, port, secrets.token_hex(8), link, measure_loopback_bits_s()
    )


def measure_loopback_bits_s() -> float:
    """What one connection can carry on this machine, network aside."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send_to, args=(server.getsockname(),), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            rate = _receive_bits_s(connection)
        sender.join(CONNECT_S)
    return rate


def _send_to(address: tuple[str, int]) -> None:
    with suppress(OSError), socket.create_connection(address, CONNECT_S) as connection:
        _send(connection)


def _measure_pair(a: int, b: int, there: NodeAddress) -> PairRate:
    """Ask the time, then receive; the best of a few tries counts, as other programs only make them slower."""
    rates: list[float] = []
    trips: list[tuple[float, float]] = []
    try:
        for _ in range(TRIES):
            with socket.create_connection((there.host, there.port), CONNECT_S) as connection:
                connection.settimeout(CONNECT_S)
                connection.sendall(there.token.encode())
                trips += _ask_time(connection)
                rates.append(_receive_bits_s(connection))
    except OSError as error:
        return PairRate(a, b, 0.0, 0.0, 0.0, f"{error.strerror or 'no answer'} at {there.host}:{there.port}")
    trip_s, ahead_s = min(trips)
    return PairRate(a, b, max(rates), trip_s, ahead_s)


def _serve_pair(server: socket.socket, token: str) -> None:
    """The other end: TRIES connections of a node that knows the token."""
    server.settimeout(CONNECT_S + SENT_S)
    for _ in range(TRIES):
        with suppress(OSError):
            try:
                connection, _ = server.accept()
            except TimeoutError:  # nothing comes through
                return
            with connection:
                connection.settimeout(CONNECT_S)
                if _receive_exactly(connection, len(token)).decode(errors="replace") != token:
                    continue
                for _ in range(PINGS):
                    _receive_exactly(connection, 1)
                    connection.sendall(struct.pack("!d", time.time()))
                _send(connection)


def _ask_time(connection: socket.socket) -> Iterator[tuple[float, float]]:
    """(there and back, how far the other clock is ahead), several times."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        before = time.time()
        connection.sendall(b"?")
        (there,) = struct.unpack("!d", _receive_exactly(connection, 8))
        after = time.time()
        yield after - before, there - (before + after) / 2


def _send(connection: socket.socket) -> None:
    """Until the other end has enough, and hangs up."""
    block, ends = bytes(BLOCK_BYTES), time.monotonic() + CONNECT_S
    with suppress(OSError):
        while time.monotonic() < ends:
            connection.sendall(block)


def _receive_bits_s(connection: socket.socket) -> float:
    room = memoryview(bytearray(BLOCK_BYTES))
    connection.settimeout(CONNECT_S)
    began = time.perf_counter()
    counted_from, counted = began, 0
    while (now := time.perf_counter()) - began < SENT_S:
        if now - began < SKIPPED_S:
            counted_from, counted = now, 0
        counted += connection.recv_into(room)
    return 8 * counted / (time.perf_counter() - counted_from)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        some = connection.recv(count - len(found))
        if not some:
            raise ConnectionError("the other end hung up")
        found += some
    return found
