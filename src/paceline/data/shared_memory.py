"""Batches from one process to another: their tensors through shared memory, the rest through a pipe.

All tensors of a message are in one anonymous file, whose descriptor is sent. It leaves no name behind, uses nothing of
/dev/shm, and is freed with its last tensor.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64

TensorSlot = tuple[int, torch.dtype, torch.Size]  # begin in the file, dtype, shape of a tensor


class _TensorPickler(ForkingPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[TensorSlot, Tensor]] = []
        self.bytes = 0

    def persistent_id(self, thing: Any) -> TensorSlot | None:
        if type(thing) is not Tensor or thing.layout != torch.strided or thing.device.type != "cpu":
            return None
        if thing.is_quantized or thing.is_conj() or thing.is_neg():
            return None
        place = self.bytes, thing.dtype, thing.shape
        self.tensors.append((place, thing.detach()))
        self.bytes = -(-(self.bytes + thing.nbytes) // ALIGNMENT) * ALIGNMENT
        return place


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor | None) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, place: TensorSlot) -> Tensor:
        if self.memory is None:
            return torch.empty(place[2], dtype=place[1])
        return _view_at(self.memory, place)


@dataclass(frozen=True)
class Message:
    pickle: bytes
    tensors: list[tuple[TensorSlot, Tensor]]
    bytes: int


def pack_message(thing: Any) -> Message:
    file = io.BytesIO()
    pickler = _TensorPickler(file)
    pickler.dump(thing)
    return Message(file.getvalue(), pickler.tensors, pickler.bytes)


def send_message(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(message.bytes.to_bytes(8, "little"))
    pipe.send_bytes(message.pickle)
    if not message.bytes:
        return
    descriptor = os.memfd_create("paceline-batch")
    try:
        os.ftruncate(descriptor, message.bytes)
        memory = _map_file(descriptor, message.bytes)
        for place, tensor in message.tensors:
            _view_at(memory, place).copy_(tensor)
        send_handle(pipe, descriptor, None)
    finally:
        os.close(descriptor)


def receive_message(pipe: Connection) -> Any:
    """Receive what `send_message` sent; it may be unpickled, as it comes from our own process."""
    size = int.from_bytes(pipe.recv_bytes(), "little")
    content = io.BytesIO(pipe.recv_bytes())
    if not size:
        return _TensorUnpickler(content, None).load()
    descriptor = recv_handle(pipe)
    try:
        memory = _map_file(descriptor, size)
    finally:
        os.close(descriptor)
    return _TensorUnpickler(content, memory).load()


def _map_file(descriptor: int, size: int) -> Tensor:
    """Map the file as bytes; the mapping outlives the descriptor."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def _view_at(memory: Tensor, place: TensorSlot) -> Tensor:
    begin, dtype, shape = place
    return memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
