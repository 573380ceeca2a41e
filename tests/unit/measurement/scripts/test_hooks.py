"""What hooks make of batches, optimisers and gradient buckets, and how they come into a process."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from paceline.measurement.scripts.buckets import TimedGroup
from paceline.measurement.scripts.command import RecordRequest
from paceline.measurement.scripts.hooks import count_batch_samples
from paceline.measurement.scripts.step_recorder import BUCKET, StepRecorder, StepTracker
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir


def array(*shape):
    return SimpleNamespace(shape=shape)


@pytest.mark.parametrize(
    ("batch", "batch_size", "samples"),
    [
        ([array(16, 3), array(16)], 16, 16),
        ({"input_ids": array(8, 128), "labels": array(8)}, None, 8),
        ({"texts": ["a", "b"], "labels": array(2)}, None, 2),
        (([array(3, 20, 30)] * 5, [{}] * 5), 5, 5),
        ([array(32, 3), array(32)], 64, 32),  # the loader of all ranks, of which this is a part
        (array(), 4, 0),
        (object(), None, 0),
    ],
)
def test_samples_of_a_batch(batch, batch_size, samples):
    assert count_batch_samples(batch, batch_size) == samples


def test_the_first_of_several_optimizers_ends_a_step_as_long_as_it_is_in_use():
    tracker, found = StepTracker(), []
    tracker.start("first")  # and an exception, which the script caught
    for name in ("first", "second", "first", "second", "second", "second", "first"):
        tracker.start(name)
        found.append(tracker.finish(name))
    assert found == [True, False, True, False, True, True, False]


def test_a_process_without_torch_is_left_alone_and_another_sitecustomize_has_its_turn(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    request = RecordRequest(str(tmp_path), 5, 1)
    environ = request.environ({**os.environ, "PYTHONPATH": str(tmp_path)})
    program = "import sys, json; print('torch' in sys.modules, 'paceline' in sys.modules, 'on_path' in str(sys.path))"
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert ended.stdout.split("\n")[:2] == ["the other one", "False False False"]
    assert RecordRequest.of(environ) == request


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
