"""What hooks make of batches and optimisers, and how they come into a process."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from paceline.measurement.scripts.command import RecordRequest
from paceline.measurement.scripts.hooks import count_batch_samples
from paceline.measurement.scripts.step_recorder import SeveralOptimizers, StepTracker


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


class Adam:
    pass


def stepped(ends, *optimizers):
    found = []
    for optimizer in optimizers:
        ends.start(optimizer)
        found.append(ends.finish(optimizer))
    return found


def test_one_optimizer_after_another_is_no_turn():
    first, second = Adam(), Adam()
    ends = StepTracker()
    assert stepped(ends, first, first, second, second) == [True] * 4
    with pytest.raises(SeveralOptimizers) as several:
        stepped(ends, first)
    assert several.value.args == (["Adam", "Adam-2"], "Adam-2")


def test_a_named_optimizer_ends_steps():
    first, second = Adam(), Adam()
    assert stepped(StepTracker("Adam-2"), first, second, first, second) == [False, True, False, True]


def test_a_step_that_was_not_ended_is_forgotten():
    outer, inner = Adam(), Adam()
    ends = StepTracker()
    ends.start(outer)
    ends.start(inner)  # and an exception, which the script caught
    assert stepped(ends, outer) == [True]


def test_a_process_without_torch_is_left_alone_and_another_sitecustomize_has_its_turn(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    request = RecordRequest(str(tmp_path), 5, 1)
    environ = request.environ({**os.environ, "PYTHONPATH": str(tmp_path)})
    program = "import sys, json; print('torch' in sys.modules, 'paceline' in sys.modules, 'on_path' in str(sys.path))"
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert ended.stdout.split("\n")[:2] == ["the other one", "False False False"]
    assert RecordRequest.of(environ) == request
