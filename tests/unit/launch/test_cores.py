"""The cores that a rank keeps to, as the kernel has them."""

import os
from dataclasses import replace

import pytest

from paceline.launch.environment import SINGLE_RANK, pin_cores

CORES = sorted(os.sched_getaffinity(0))


def seen(ranks: int, rank: int, threads: int) -> list[int]:
    with pin_cores(replace(SINGLE_RANK, rank=rank, world=ranks, local_rank=rank, local_world=ranks), threads):
        found = sorted(os.sched_getaffinity(0))
    assert sorted(os.sched_getaffinity(0)) == CORES
    return found


@pytest.mark.skipif(len(CORES) == 1, reason="one core cannot be divided")
def test_ranks_that_take_all_cores_have_each_its_share():
    assert [seen(len(CORES), rank, 1) for rank in range(len(CORES))] == [[core] for core in CORES]
    if len(CORES) % 2 == 0:
        half = len(CORES) // 2
        assert seen(2, 0, half) + seen(2, 1, half) == CORES


@pytest.mark.parametrize(("ranks", "threads"), [(1, len(CORES)), (len(CORES) + 1, 1), (2, len(CORES)), (1, 1)])
def test_others_keep_all(ranks, threads):
    assert seen(ranks, 0, threads) == CORES


def test_cores_are_given_back_after_a_failure():
    place = replace(SINGLE_RANK, world=2, local_world=2)
    with pytest.raises(ZeroDivisionError), pin_cores(place, len(CORES) // 2):
        raise ZeroDivisionError
    assert sorted(os.sched_getaffinity(0)) == CORES
