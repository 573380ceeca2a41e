"""Pinned rows that are used again. Events and pinned memory need a CUDA device, and are stood in for here."""

from typing import ClassVar

import pytest
import torch

from paceline.trainer.step import cuda_graph
from paceline.trainer.step.cuda_graph import PinnedBuffers, pack_batch


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
