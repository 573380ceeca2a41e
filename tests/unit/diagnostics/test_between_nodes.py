"""What lies between nodes: who cannot be reached is named, and so is the pair that is slow or the clock that is off."""

import socket
import threading
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.diagnostics import network_checks, nodes
from paceline.diagnostics.network_checks import NodeAddress, PairRate, check_clocks, judge_pairs, schedule_pairs
from paceline.diagnostics.nodes import RendezvousFailed, join_rendezvous
from paceline.launch.environment import RankInfo

GIGABIT = 1e9


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(nodes, "RENDEZVOUS_S", 0.5)


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def place(rank, port, world=2, address="127.0.0.1"):
    return RankInfo(rank, world, 0, 1, "torchrun", address, port)


def refused(here):
    with pytest.raises(RendezvousFailed) as error:
        join_rendezvous(here)
    return error.value.finding


@pytest.mark.parametrize(
    ("rank", "world", "address", "found"),
    [
        (1, 2, "127.0.0.1", "127.0.0.1:"),
        (1, 2, "no-such-node.invalid", "no-such-node.invalid:"),
        (0, 3, "127.0.0.1", "rank 1, 2 of 3 has not come to 127.0.0.1:"),
    ],
)
def test_who_is_missing_is_named(rank, world, address, found):
    finding = refused(place(rank, free_port(), world, address))
    assert finding.found.startswith(found)
    assert (finding.check, finding.verdict) == ("port of rank 0" if rank else "meeting", "wrong")


@pytest.mark.parametrize("rank", [0, 1])
def test_another_program_at_the_port_is_named_and_no_hang(rank, monkeypatch):
    monkeypatch.setattr(nodes, "CONNECT_TRY_S", 0.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        finding = refused(place(rank, port))
    assert finding.found.startswith(f"127.0.0.1:{port}: ")
    assert (finding.check, finding.verdict) == ("port of rank 0", "wrong")


def test_two_nodes_measure_each_other(monkeypatch):
    """As threads of this process, which stand for the nodes: both meet, and the main one knows both directions."""
    monkeypatch.setattr(nodes, "RENDEZVOUS_S", 20.0)
    port, found = free_port(), {}

    def node(rank):
        met = join_rendezvous(place(rank, port))
        found[rank] = network_checks.check_links(met), met.hosts
        met.leave()

    threads = [threading.Thread(target=node, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    name = socket.gethostname()
    assert found[1] == ([], [f"{name}#0", f"{name}#1"]), "nodes of one name are told apart"
    checks = {finding.check for finding in found[0][0]}
    assert checks in ({"links", "clocks"}, {"link", "clocks"})
    (clock,) = [finding for finding in found[0][0] if finding.check == "clocks"]
    assert clock.verdict == "ok"


@given(st.integers(2, 20))
def test_every_two_nodes_meet_once_and_nobody_twice_at_a_time(nodes):
    met = [pair for some in schedule_pairs(nodes) for pair in some]
    assert sorted(met) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for some in schedule_pairs(nodes):
        assert len({node for pair in some for node in pair}) == 2 * len(some)


def address(link=10 * GIGABIT, own=20 * GIGABIT):
    return NodeAddress("127.0.0.1", 1, link, own)


def pair(a, b, rate, ahead_s=0.0, why_not=""):
    return PairRate(a, b, rate, 1e-4, ahead_s, why_not)


HOSTS = ["n1", "n2", "n3"]


def test_links_as_fast_as_they_say_are_one_row():
    pairs = [pair(a, b, 9.2 * GIGABIT) for a, b in ((0, 1), (1, 0), (0, 2))]
    (finding,) = judge_pairs(pairs, [address()] * 3, HOSTS)
    assert (finding.check, finding.verdict) == ("links", "ok")
    assert finding.found == "9.2 Gbit/s to 9.2 Gbit/s, 100 µs there and back"


def test_the_slow_pair_is_named_by_its_link_and_by_the_others_and_the_closed_one():
    (finding,) = judge_pairs([pair(0, 1, 0.1 * GIGABIT)], [address()] * 3, HOSTS)
    assert finding.found == "n2 to n1: 100 Mbit/s"
    assert finding.expected == "about 10 Gbit/s, by a link of 10 Gbit/s"
    assert finding.verdict == "wrong"
    (closed,) = judge_pairs([pair(0, 1, 0.0, why_not="timed out at n2:4711")], [address()] * 3, HOSTS)
    assert (closed.check, closed.found) == ("ports", "n2 to n1: timed out at n2:4711")
    unknown = [address(link=None, own=3 * GIGABIT)] * 3
    pairs = [pair(a, b, rate * GIGABIT) for a, b, rate in ((0, 1, 1.0), (0, 2, 2.5), (1, 2, 2.6))]
    (slow,) = judge_pairs(pairs, unknown, HOSTS)
    assert slow.verdict == "wrong"
    assert "the median of all pairs is 2.5 Gbit/s" in slow.expected


@pytest.mark.parametrize(("ahead_s", "verdict"), [(0.01, "ok"), (0.5, "look"), (-30.0, "wrong")])
def test_clocks_that_differ(ahead_s, verdict):
    (finding,) = check_clocks([pair(0, 1, GIGABIT, ahead_s)], HOSTS)
    assert finding.verdict == verdict
    if verdict == "wrong":
        assert finding.found == "n2 is 30.0 s behind n1"
