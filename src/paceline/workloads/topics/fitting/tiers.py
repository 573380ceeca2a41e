"""Documents in tiers: as many as fit on the device, then in pinned host memory, the rest read from disk at each pass.

A thread copies the next block in its own CUDA stream while the device works on the last one.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import psutil
import torch

from paceline.workloads.topics.counts.arrays import DeviceCounts
from paceline.workloads.topics.counts.matrices import Counts, Csr, DocumentBlock, join_rows
from paceline.workloads.topics.counts.stream import iterate_blocks
from paceline.workloads.topics.fitting import passes
from paceline.workloads.topics.sizes import BLOCK_BYTES, DEVICE_SHARE, HOST_SHARE, SORT_BYTES, pad_to_tile

Tensor = Any  # torch is not typed here


class TieredDocuments:
    """The documents start..stop of `counts` for a device; `per_document` and the rows of L are theirs."""

    def __init__(
        self, counts: Counts, per_document: Tensor, q: Tensor, device: Any, start: int = 0, stop: int | None = None
    ) -> None:
        self.counts, self.device = counts, torch.device(device)
        self.start, self.stop = start, counts.documents if stop is None else stop
        self.per_document = torch.as_tensor(per_document).to(self.device, torch.float32)
        self.q = torch.as_tensor(q).to(self.device, torch.float32)
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.of_shares: dict[int, Tensor] = {}  # by the first document of a block: found once, in the first pass
        self.resident: list[passes.RangePass] = []
        self.pinned: list[DocumentBlock] = []
        source = iterate_blocks(counts, self.start, self.stop, BLOCK_BYTES)
        host_bytes = int(HOST_SHARE * psutil.virtual_memory().available)
        rest = self._fill_device(source, get_free_device_bytes(self.device))
        self.on_disk = self._fill_host(rest, host_bytes)

    def _fill_device(self, source: Iterator[DocumentBlock], budget: int) -> Iterator[DocumentBlock]:
        head = next(source, None)
        if head is None:
            return source
        source = itertools.chain([head], source)
        if not isinstance(head.values, Csr):
            room = min(self.stop - self.start, budget // (head.values.itemsize * pad_to_tile(len(self.q))))
            return self._fill_dense(source, head.values.dtype, room)
        taken: list[Csr] = []
        for block in source:
            budget -= (1 + SORT_BYTES) * block_bytes(block)
            if budget < 0 or not isinstance(block.values, Csr):
                source = itertools.chain([block], source)
                break
            taken.append(block.values)
        if taken:
            whole = DocumentBlock(self.start, join_rows(taken))
            last = whole.stop - self.start
            self.resident.append((0, last, passes.make_pass(whole, self.per_document[:last], self.q, self.device)))
        return source

    def _fill_dense(self, source: Iterator[DocumentBlock], dtype: np.dtype, room: int) -> Iterator[DocumentBlock]:
        if room < 1:
            return source
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        whole = torch.zeros(pad_to_tile(room), pad_to_tile(len(self.q)), dtype=torch_dtype, device=self.device)
        filled = 0
        for block in source:
            values: Any = block.values
            fits = min(len(values), room - filled) if values.dtype == dtype else 0
            if fits:
                passes.copy_rows(values[:fits], whole[filled : filled + fits, : values.shape[1]])
                filled += fits
            if fits < len(values):
                source = itertools.chain([DocumentBlock(block.start + fits, values[fits:])], source)
                break
        counts = whole if passes.can_run_triton(self.device) else whole[:filled, : len(self.q)]
        self.resident.append((0, filled, passes.make_device_pass(counts, self.per_document[:filled], self.q)))
        return source

    def _fill_host(self, source: Iterator[DocumentBlock], budget: int) -> int:
        if self.side is None:
            budget = 0
        for block in source:
            budget -= block_bytes(block)
            if budget < 0:
                return block.start
            fixed = [torch.from_numpy(np.ascontiguousarray(part)).pin_memory().numpy() for part in block.parts]
            values = Csr(*fixed) if isinstance(block.values, Csr) else fixed[0]
            self.pinned.append(DocumentBlock(block.start, values))
        return self.stop

    def steps(self) -> Iterator[passes.RangePass]:
        """Yield the passes over all documents in order, with their rows; use each before asking for the next."""
        yield from self.resident
        if self.pinned or self.on_disk < self.stop:
            disk = iterate_blocks(self.counts, self.on_disk, self.stop, BLOCK_BYTES)
            yield from self._stream_blocks(itertools.chain(self.pinned, disk))

    def _stream_blocks(self, source: Iterator[DocumentBlock]) -> Iterator[passes.RangePass]:
        def fetch(free_after: Any) -> Any:
            """Copy the next block to the device; only what was released before `free_after` may be overwritten."""
            block = next(source, None)
            if block is None:
                return None
            first, last = block.start - self.start, block.stop - self.start
            if free_after is not None:
                free_after.synchronize()
            with torch.cuda.stream(self.side) if self.side else nullcontext():
                step = passes.make_pass(block, self.per_document[first:last], self.q, self.device)
                return first, last, step, self.side.record_event() if self.side else None

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


def block_bytes(block: DocumentBlock) -> int:
    return sum(part.nbytes for part in block.parts)


def get_free_device_bytes(device: torch.device) -> int:
    """Return the bytes for counts, of what is free and what torch has cached."""
    if device.type != "cuda":
        return 1 << 62
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(DEVICE_SHARE * (torch.cuda.mem_get_info(device)[0] + kept))


def sum_counts(counts: DeviceCounts) -> tuple[Tensor, Tensor]:
    return passes.sum_sparse(counts.values, counts.terms) if counts.sparse else passes.sum_dense_counts(counts.values)


def make_device_passes(
    counts: DeviceCounts, per_document: Tensor, per_term: Tensor, share: Tensor
) -> passes.ReadPasses:
    """Return the passes over all documents: one if its scratch memory fits beside them, else over some at a time.

    Scratch memory is a copy of dense counts in whole tiles, or the sort of sparse ones by term. `per_term` are sums of
    these documents, `share` is of all ranks.
    """
    needed = SORT_BYTES * counts.stored_bytes if counts.sparse else passes.tile_copy_bytes(counts.values)
    if needed <= get_free_device_bytes(counts.device):
        whole = [(0, counts.documents, passes.make_device_pass(counts.values, per_document, share, per_term))]
        return lambda: whole if counts.documents else []
    rows = max(1, min(counts.documents, get_free_device_bytes(counts.device) * counts.documents // needed) // 2)
    ranges = [(first, min(counts.documents, first + rows)) for first in range(0, counts.documents, rows)]
    make = passes.make_device_pass
    return lambda: ((a, b, make(counts.part(a, b).values, per_document[a:b], share)) for a, b in ranges)
