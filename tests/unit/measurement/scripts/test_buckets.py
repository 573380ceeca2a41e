"""Which part of the gradient buckets' flights a backward pass waits for."""

import time

import pytest
import torch
import torch.distributed as dist

from paceline.measurement.scripts.buckets import TimedGroup
from paceline.measurement.scripts.command import RecordRequest
from paceline.measurement.scripts.step_recorder import BUCKET, StepRecorder
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir

APART_S = 0.02


class Late(dist.ProcessGroup):
    """Its sums are there when the test says so."""

    def __init__(self):
        super().__init__(0, 2)
        self.flying = []

    def allreduce(self, tensors, options):
        self.flying.append(torch.futures.Future())
        return self

    def get_future(self):
        return self.flying[-1]

    def land(self):
        for future in self.flying:
            future.set_result(None)
        self.flying.clear()


@pytest.fixture
def notes(tmp_path):
    return StepRecorder(RecordRequest(str(tmp_path), 1 << 30, 1))


@pytest.mark.parametrize("passes", [1, 2])
def test_what_flies_after_the_last_bucket_of_a_pass_is_exposed(notes, tmp_path, passes):
    optimizer = torch.optim.SGD([torch.ones(1)])
    late, buckets = Late(), [torch.ones(2), torch.ones(3)]
    group = TimedGroup(late, notes)
    notes.optimizer_ended(optimizer)
    for _ in range(passes):
        for bucket in buckets:
            group.allreduce([bucket], dist.AllreduceOptions())
            time.sleep(APART_S)  # after the first the pass goes on, after the last it waits
        late.land()
    notes.optimizer_ended(optimizer)
    notes.close()
    (step,) = read_steps(RunDir(tmp_path).events_file(0))
    assert step["exposed_s"] >= passes * APART_S
    assert step["comm_s"] - step["exposed_s"] >= passes * APART_S


def test_one_step_in_four_is_watched_and_speaks_for_those_after_it(notes, tmp_path):
    optimizer, told = torch.optim.SGD([torch.ones(1)]), []
    notes.watchers.append(told.append)
    for number in range(13):
        if notes.watching:
            sent = notes.mark()
            notes.noted.append((BUCKET, sent, sent + number / 1e6, 0))
        time.sleep(0.001)
        notes.optimizer_ended(optimizer)
    notes.close()
    found = [round(1e6 * step["comm_s"]) for step in read_steps(RunDir(tmp_path).events_file(0))]
    assert found == [1, 2, 3, 4, 5, 5, 5, 5, 9, 9, 9, 9]
    assert told == [False, True, False, True]
