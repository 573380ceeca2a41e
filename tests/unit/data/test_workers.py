"""How many worker processes a rank starts, what they are asked, and what comes back through shared memory."""

import multiprocessing
import os
import time
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from paceline.config import RunSpec, Section
from paceline.config.sections import DataSection, merge_section_fields
from paceline.data import workers
from paceline.data.prefetch import count_workers, iter_batches, map_in_order
from paceline.data.samples import samples_of
from paceline.data.workers import (
    Message,
    WorkerSamples,
    choose_worker_count,
    cores_of,
    describe_workers,
    receive_message,
    send_message,
    start_workers,
)
from paceline.launch.environment import SINGLE_RANK
from paceline.workload import Workload

Pair = namedtuple("Pair", "x y")
IDS, KEYS = np.arange(4), np.zeros(4, np.int64)


class Items(Dataset):
    def __init__(self, sample_s=0.0):
        self.sample_s = sample_s

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(self.sample_s)
        return torch.tensor([index, os.getpid()])


class OwnSamples(Items):
    def cost(self, ids):
        return ids + 1

    def batch(self, ids, keys):
        return torch.stack([self[i] for i in ids])

    def padded(self, ids, keys, rows):
        return torch.tensor([rows, os.getpid()])


class Own(Workload):
    def __init__(self, data, workers):
        spec = RunSpec()
        super().__init__(spec.model_copy(update={"data": merge_section_fields(Section, DataSection)(workers=workers)}))
        self.found = data

    def data(self, split):
        return self.found if split == "train" else None


@pytest.mark.parametrize(
    ("data", "asked", "started"),
    [
        (Items(), 0, 0),
        (Items(), 3, 3),
        (Items(), "auto", 1),
        (OwnSamples(), "auto", 0),
        (OwnSamples(), 1, 1),
        (OwnSamples(sample_s=0.05 * len(os.sched_getaffinity(0))), "auto", len(os.sched_getaffinity(0))),
        (torch.arange(12.0), "auto", 0),
    ],
)
def test_as_many_as_asked_for_or_as_pay(data, asked, started, monkeypatch):
    monkeypatch.setattr(workers, "TOLERATED_WAIT_S", 0.1)  # so that a busy machine is not taken for slow samples
    workload = Own(data, asked)
    with start_workers(workload, SINGLE_RANK, samples_per_step=2):
        samples = samples_of(workload)
        assert count_workers(samples) == min(started, 16)
        assert isinstance(samples, WorkerSamples) == (started > 0)
        assert samples_of(workload, "test") is None
        made = list(iter_batches(samples, [(IDS, KEYS), (IDS + 4, KEYS)]))
    assert not isinstance(samples_of(workload), WorkerSamples)
    if data.__class__ in (Items, OwnSamples):
        assert [rows[:, 0].tolist() for rows in made] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert {int(pid) == os.getpid() for rows in made for pid in rows[:, 1]} == {not started}


def test_they_have_what_the_samples_have():
    workload = Own(OwnSamples(), 1)
    with start_workers(workload, SINGLE_RANK, samples_per_step=8):
        samples = samples_of(workload)
        rows, pid = samples.padded(IDS, KEYS, 5).tolist()
        assert (rows, pid != os.getpid()) == (5, True)
        assert samples.cost(IDS).tolist() == [1, 2, 3, 4]
        assert not hasattr(samples, "fixed_shape_batches")
        assert describe_workers(samples) == ["1 worker process for samples"]


@pytest.mark.parametrize(
    ("step_s", "cores", "expected"), [(0.0, 8, 1), (0.001, 8, 1), (0.01, 8, 5), (9.0, 8, 8), (9.0, 99, 16)]
)
def test_the_number_that_pays(step_s, cores, expected):
    assert choose_worker_count(step_s, cores) == expected


def test_ranks_of_one_machine_share_its_cores_unless_they_are_bound():
    seen, two = len(os.sched_getaffinity(0)), replace(SINGLE_RANK, local_world=2)
    found = [cores_of(SINGLE_RANK), *(cores_of(replace(two, launcher=name)) for name in ("torchrun", "srun"))]
    assert found == [seen, max(1, seen // 2), seen]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_what_is_made_side_by_side_comes_in_order(threads):
    def make(number):
        time.sleep(0.002 * (5 - number % 5))
        if number == 11:
            raise ValueError(number)
        return number

    made = map_in_order(make, iter(range(99)), threads)
    assert [next(made) for _ in range(11)] == list(range(11))
    with pytest.raises(ValueError, match="11"):
        next(made)


def test_batches_travel_whole():
    ours, theirs = multiprocessing.Pipe()
    odd = torch.arange(12).view(3, 4).t()[1:]
    batch = Pair(
        {"x": odd, "e": torch.empty(0, 3), "b": torch.tensor(True)},
        [np.arange(3), "word", torch.ones(2, requires_grad=True)[0]],
    )
    before = len(os.listdir("/proc/self/fd"))
    for thing in (batch, "no tensor", torch.empty(0, 2)):
        send_message(ours, Message(thing))
        found = receive_message(theirs)
        if thing is batch:
            assert type(found) is Pair
            assert torch.equal(found.x["x"], odd)
            assert (found.x["e"].shape, bool(found.x["b"])) == ((0, 3), True)
            assert (found.y[0].tolist(), found.y[1], float(found.y[2])) == ([0, 1, 2], "word", 1.0)
            found.x["x"] += 1  # it is ours to change
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor per batch would run out"
