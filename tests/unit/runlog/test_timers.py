"""The arithmetic of the four times, against intervals whose times are known."""

import pytest

from paceline.runlog.timers import CollectiveTimer, compute_comm_times, sum_union


@pytest.mark.parametrize(
    ("intervals", "want"),
    [
        *(([], 0), ([(0, 1)], 1), ([(0, 2), (1, 3)], 3)),
        *(([(0, 1), (2, 3)], 2), ([(0, 5), (1, 2), (3, 4)], 5), ([(2, 3), (0, 1), (0, 1)], 2)),
    ],
)
def test_union(intervals, want):
    assert sum_union(intervals) == want


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
    assert compute_comm_times(buckets, blocking) == pytest.approx((comm, exposed))


def test_flights_belong_to_one_step(monkeypatch):
    clock = iter([10.0, 12.0, 12.5, 13.5])
    monkeypatch.setattr("paceline.runlog.timers.perf_counter", lambda: next(clock))
    timer = CollectiveTimer()
    timer.bucket_done(timer.now())
    with timer.blocking():
        pass
    comm, exposed = timer.take()()
    assert comm == 2 + 1
    assert exposed == comm, "the only bucket was handed over at the start"
    assert timer.take()() == (0, 0)
