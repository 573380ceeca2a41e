"""Unix sockets in place of the TCP connections that XGBoost has made between ranks of one host.

A round sends histograms ten times or so, and each rank waits until they are there, with TCP for longer. XGBoost knows a
connection by the number of an open file. That number is given to another one, between the same two ranks. Where it
cannot be done on all of them, all keep what they have.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from paceline.launch.environment import Place
from paceline.launch.group import gather_objects

BUFFER_BYTES = 1 << 22
"""Of histograms on their way, or as many as the system allows."""
Ends = tuple[tuple[str, int], tuple[str, int]]
"""The address of a connection here, and there."""


def connections() -> dict[Ends, int]:
    """The TCP connections of this process, as open files by their ends."""
    import psutil

    made = [one for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
    return {(tuple(one.laddr), tuple(one.raddr)): one.fd for one in made}


def replace_tcp(place: Place, made: dict[Ends, int], timeout_s: float) -> bool:
    """On every rank of one host, before anything is sent over the connections that were made; whether it was done."""
    with ExitStack() as until_done:
        listening = until_done.enter_context(socket.socket(socket.AF_UNIX))
        with suppress(OSError):  # there may be no room for a folder, or its name may be too long
            folder = until_done.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
            listening.bind(f"{folder}/rank")
            listening.listen(place.world)
        offers = gather_objects((listening.getsockname(), made))
        files = _by_peer(place.rank, [ends for _, ends in offers]) if all(path for path, _ in offers) else {}
        if not all(gather_objects(len(files) == place.world - 1)):
            return False
        peers: dict[int, socket.socket] = {}
        with suppress(OSError):
            peers = _met(place, listening, [path for path, _ in offers], timeout_s)
        for peer in peers.values():
            until_done.enter_context(peer)
        if not all(gather_objects(len(peers) == place.world - 1)):
            return False
        for rank, peer in peers.items():
            peer.setblocking(False)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            os.dup2(peer.fileno(), files[rank], inheritable=False)
    return True


def _by_peer(rank: int, ends: Sequence[dict[Ends, int]]) -> dict[int, int]:
    """This rank's open file of its one connection with each other rank; none with whom there are several."""
    found = {}
    for other, theirs in enumerate(ends):
        shared = [file for (here, there), file in ends[rank].items() if (there, here) in theirs]
        if other != rank and len(shared) == 1:
            found[other] = shared[0]
    return found


def _met(place: Place, listening: socket.socket, paths: Sequence[str], timeout_s: float) -> dict[int, socket.socket]:
    """A connection with each other rank, which those of higher numbers make and say their number on."""
    found = {}
    for rank in range(place.rank):
        found[rank] = socket.socket(socket.AF_UNIX)
        found[rank].settimeout(timeout_s)
        found[rank].connect(paths[rank])
        found[rank].sendall(place.rank.to_bytes(4, "big"))
    listening.settimeout(timeout_s)
    while len(found) < place.world - 1:
        peer, _ = listening.accept()
        peer.settimeout(timeout_s)
        found[int.from_bytes(peer.recv(4), "big")] = peer
    return found
