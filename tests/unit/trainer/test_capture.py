"""Pinned rows that are used again. Events and pinned memory need a CUDA device, and are stood in for here."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from paceline.trainer.step import cuda_graph
from paceline.trainer.step.cuda_graph import PinnedBuffers, RecordedStep, pack_batch


class Event:
    """Over when the test says so."""

    waiting: ClassVar[list["Event"]] = []

    def __init__(self):
        self.over = False
        Event.waiting.append(self)

    def record(self):
        pass

    def query(self):
        return self.over


@pytest.fixture
def buffers(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sides, pin_memory=False, **more: empty(*sides, **more))
    monkeypatch.setattr(cuda_graph.torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waiting", [])
    return PinnedBuffers()


def test_a_row_is_used_again_once_its_copy_is_over(buffers):
    first, second = buffers.row(64), buffers.row(64)
    assert first.data_ptr() != second.data_ptr()
    buffers.give_back(first)
    assert buffers.row(64).data_ptr() not in (first.data_ptr(), second.data_ptr())  # the copy still reads it
    Event.waiting[0].over = True
    buffers.give_back(second)
    assert buffers.row(64).data_ptr() == first.data_ptr()
    assert buffers.row(64).data_ptr() != second.data_ptr()
    assert len(buffers.row(72)) == 72  # another size


def test_what_is_put_in_comes_out(buffers):
    batches = [{"ids": torch.arange(n, dtype=torch.int32), "keys": torch.arange(3) + n, "name": "x"} for n in (5, 5, 8)]
    for batch in batches:
        sent = pack_batch(batch, buffers)
        opened = sent.unpack(sent.row)
        assert opened["name"] == "x"
        for name in ("ids", "keys"):
            assert torch.equal(opened[name], batch[name])
        buffers.give_back(sent.row)
        Event.waiting[-1].over = True


class KernelError(Exception):
    """As other libraries raise, which is no RuntimeError."""


def test_a_kernel_that_fails_under_the_recorder_leaves_the_run_eager_and_is_named_once(monkeypatch):
    def fail(step, sent, net):
        raise KernelError("this kernel cannot be recorded")

    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    monkeypatch.setattr(cuda_graph.torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(cuda_graph, "restore_after", lambda step: nullcontext())
    monkeypatch.setattr(RecordedStep, "_record", fail)
    step, notices = object.__new__(RecordedStep), []
    model = SimpleNamespace(unwrapped=None, local_parameters=SimpleNamespace(clear_gradients=lambda: None))
    scaler = SimpleNamespace(scale=SimpleNamespace(device=torch.device("cuda", 0)))
    step.state, step.notice = SimpleNamespace(model=model, scaler=scaler), notices.append
    step.recorded, step.eager, step.any_shape, step.compiled, step.compilation = {}, False, False, None, None
    sent = SimpleNamespace(leaves=())
    assert step._recorded(sent, whole=True) is None
    assert step.eager
    assert step.times_recorded == 1
    assert len(notices) == 1
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise KernelError" in text)
    assert f"test_capture.py, line {line}" in notices[0]
