"""The arithmetic of the four times, against flights whose times are known."""

import time

import pytest

from paceline.measuring.timers import Flights, comm_and_exposed, union


@pytest.mark.parametrize(
    ("intervals", "want"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 2), (1, 3)], 3),
        ([(0, 1), (2, 3)], 2),
        ([(0, 5), (1, 2), (3, 4)], 5),
        ([(2, 3), (0, 1), (0, 1)], 2),
    ],
)
def test_union(intervals, want):
    assert union(intervals) == want


@pytest.mark.parametrize(
    ("buckets", "blocking", "comm", "exposed"),
    [
        ([], [], 0, 0),
        ([(0, 4), (2, 6), (5, 9)], [], 9, 4),  # the last was handed over at 5 and landed at 9
        ([(0, 1), (2, 3), (4, 5)], [], 3, 1),
        ([(0, 4)], [(5, 7)], 6, 6),
        ([], [(0, 2)], 2, 2),
        ([(0, 10), (9, 9.5)], [], 10, 1),  # an early bucket that lands last is waited for too
    ],
)
def test_comm_and_exposed(buckets, blocking, comm, exposed):
    assert comm_and_exposed(buckets, blocking) == pytest.approx((comm, exposed))


def test_flights_belong_to_one_step():
    flights = Flights()
    started = flights.now()
    time.sleep(0.02)
    flights.landed(started)
    waited = flights.now()
    time.sleep(0.01)
    flights.waited(waited)
    comm, exposed = flights.take()()
    assert 0.03 <= comm < 0.2
    assert exposed == pytest.approx(comm, abs=5e-3), "the only bucket was handed over at the start"
    assert flights.take()() == (0, 0)


def test_the_timers_cost_microseconds():
    """Ten buckets a step: far under 1 % of a step of 10 ms."""
    flights = Flights()
    began = time.perf_counter()
    for _ in range(200):
        for _ in range(10):
            flights.landed(flights.now())
        flights.waited(flights.now())
        flights.take()()
    assert (time.perf_counter() - began) / 200 < 1e-4
