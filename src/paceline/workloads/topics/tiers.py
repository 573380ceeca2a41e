"""All documents of a rank in one pass, wherever their counts fit: on the device, in pinned host memory, or on disk.

The first documents stay on the device, the next ones in pinned memory; the rest is read from its source at each pass. A
thread brings the next block over in a stream of its own while the device works on the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from paceline.workloads.topics.blocks import Block, Counts, Csr, joined
from paceline.workloads.topics.device import (
    DensePass,
    Pass,
    PlainDense,
    copy_rows,
    make_pass,
    padded,
    triton_runs_on,
)
from paceline.workloads.topics.sizes import DEVICE_BLOCK_BYTES, DEVICE_SHARE, HOST_SHARE, SORT_BYTES
from paceline.workloads.topics.stream import blocks

Tensor = Any


class Tiers:
    """The documents start..stop of `counts` for a device. `per_document` and the rows of L are those of this range."""

    def __init__(
        self,
        counts: Counts,
        per_document: Tensor,
        q: Tensor,
        device: Any,
        *,
        start: int = 0,
        stop: int | None = None,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        block_bytes: int = DEVICE_BLOCK_BYTES,
    ) -> None:
        self.counts, self.device, self.block_bytes = counts, torch.device(device), block_bytes
        self.start, self.stop = start, counts.documents if stop is None else stop
        self.per_document = torch.as_tensor(per_document).to(self.device, torch.float32)
        self.q = torch.as_tensor(q).to(self.device, torch.float32)
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.of_shares: dict[int, Tensor] = {}  # by the first document of a block: found once, in the first pass
        self.resident: list[tuple[int, int, Pass]] = []
        self.pinned: list[Block] = []
        source = blocks(counts, self.start, self.stop, block_bytes)
        rest = self._fill_device(source, free_device_bytes(self.device) if device_bytes is None else device_bytes)
        self.on_disk = self._fill_host(rest, free_host_bytes() if host_bytes is None else host_bytes)

    def _fill_device(self, source: Iterator[Block], budget: int) -> Iterator[Block]:
        """As many documents as fit, as one pass; what does not fit is handed back."""
        head = next(source, None)
        if head is None:
            return source
        source = itertools.chain([head], source)
        if not isinstance(head.values, Csr):
            room = min(self.stop - self.start, budget // (head.values.itemsize * padded(len(self.q))))
            return self._fill_dense(source, head.values.dtype, room)
        taken: list[Csr] = []
        for block in source:
            budget -= (1 + SORT_BYTES) * block_bytes(block)
            if budget < 0 or not isinstance(block.values, Csr):
                source = itertools.chain([block], source)
                break
            taken.append(block.values)
        if taken:
            whole = Block(self.start, joined(taken))
            last = whole.stop - self.start
            self.resident.append((0, last, make_pass(whole, self.per_document[:last], self.q, self.device)))
        return source

    def _fill_dense(self, source: Iterator[Block], dtype: np.dtype, room: int) -> Iterator[Block]:
        """`room` documents into one matrix on the device, copied in pieces: they are there once only."""
        if room < 1:
            return source
        dtype_there = torch.from_numpy(np.empty(0, dtype)).dtype
        whole = torch.zeros(padded(room), padded(len(self.q)), dtype=dtype_there, device=self.device)
        filled = 0
        for block in source:
            values: Any = block.values
            fits = min(len(values), room - filled) if values.dtype == dtype else 0
            if fits:
                copy_rows(values[:fits], whole[filled : filled + fits, : values.shape[1]])
                filled += fits
            if fits < len(values):
                source = itertools.chain([Block(block.start + fits, values[fits:])], source)
                break
        share = self.q.clamp_min(1e-30)
        if triton_runs_on(self.device):
            step: Pass = DensePass(whole, self.per_document[:filled], share)
        else:
            step = PlainDense(whole[:filled, : len(share)])
        self.resident.append((0, filled, step))
        return source

    def _fill_host(self, source: Iterator[Block], budget: int) -> int:
        """Blocks into pinned memory; returns the first document that is left on disk."""
        if self.side is None:
            budget = 0
        for block in source:
            budget -= block_bytes(block)
            if budget < 0:
                return block.start
            self.pinned.append(pinned(block))
        return self.stop

    def steps(self) -> Iterator[tuple[int, int, Pass]]:
        """The passes over all documents in order, each with its range of rows. Use each before asking for the next."""
        yield from self.resident
        if self.pinned or self.on_disk < self.stop:
            disk = blocks(self.counts, self.on_disk, self.stop, self.block_bytes) if self.on_disk < self.stop else ()
            yield from self._streamed(itertools.chain(self.pinned, disk))

    def _streamed(self, source: Iterator[Block]) -> Iterator[tuple[int, int, Pass]]:
        def fetch(free_after: Any) -> Any:
            """The next block on the device. What is released after `free_after` may be overwritten, nothing later."""
            block = next(source, None)
            if block is None:
                return None
            first, last = block.start - self.start, block.stop - self.start
            if self.side is None:
                return first, last, make_pass(block, self.per_document[first:last], self.q, self.device), None
            if free_after is not None:
                free_after.synchronize()
            with torch.cuda.stream(self.side):
                step = make_pass(block, self.per_document[first:last], self.q, self.device)
                return first, last, step, self.side.record_event()

        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
        with ThreadPoolExecutor(1) as reader:
            coming, done = reader.submit(fetch, None), None
            while (item := coming.result()) is not None:
                first, last, step, ready = item
                coming = reader.submit(fetch, done)
                if ready is not None:
                    torch.cuda.current_stream(self.device).wait_event(ready)
                if first in self.of_shares:
                    step.of_shares = self.of_shares[first]
                yield first, last, step
                if "of_shares" in vars(step):
                    self.of_shares[first] = step.of_shares
                done = torch.cuda.current_stream(self.device).record_event() if ready is not None else None


def block_bytes(block: Block) -> int:
    return sum(part.nbytes for part in block.parts)


def pinned(block: Block) -> Block:
    fixed = [torch.from_numpy(np.ascontiguousarray(part)).pin_memory().numpy() for part in block.parts]
    return Block(block.start, Csr(*fixed) if isinstance(block.values, Csr) else fixed[0])


def free_device_bytes(device: torch.device) -> int:
    """Of what is free, and of what torch keeps for later."""
    if device.type != "cuda":
        return 1 << 62
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(DEVICE_SHARE * (torch.cuda.mem_get_info(device)[0] + kept))


def free_host_bytes() -> int:
    import psutil

    return int(HOST_SHARE * psutil.virtual_memory().available)
