"""One rank's part of a fit: its documents, where their counts are kept, and the first point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.workloads.topics.counts.blocks import Counts
from paceline.workloads.topics.counts.on_device import DeviceCounts
from paceline.workloads.topics.counts.stream import blocks, scans, totals
from paceline.workloads.topics.device.passes import RangePass, ReadPasses
from paceline.workloads.topics.device.tiers import Tiers, passes_of, sums_of
from paceline.workloads.topics.fitting.engine import AcceleratedEM
from paceline.workloads.topics.fitting.on_cores import cpu_pass
from paceline.workloads.topics.fitting.options import FitOptions
from paceline.workloads.topics.fitting.start import FEW_SWEEPS, SWEEPS, StartSample, first_rows, first_topics
from paceline.workloads.topics.sizes import CORE_BLOCK_BYTES, SCANNED_BYTES

Tensor = Any  # torch.Tensor; torch is not typed here
MOST_TOPICS = 512
LARGEST = 1e30
DENSE_CHECK = 5  # passes over dense counts on a device for one loss


@dataclass(frozen=True)
class Problem:
    """Some documents of counts, for one device. `share` is what each term is of all counts."""

    counts: Counts
    per_document: Tensor  # float32, of these documents
    per_term: Tensor  # float64, of all documents
    share: Tensor  # float32
    device: torch.device
    documents: ReadPasses

    def begin(self, k: int, options: FitOptions) -> AcceleratedEM:
        """The first point: topics of a sample, the same on every rank, and rows of L for them."""
        Ft = torch.empty(self.counts.terms, k, device=self.device)
        if not _several() or dist.get_rank() == 0:
            Ft = self._first_topics(k, options)
        if _several():
            dist.broadcast(Ft, 0)
        L = torch.empty(len(self.per_document), k, device=self.device)
        sweeps = FEW_SWEEPS if self.counts.sparse and self.device.type == "cpu" else SWEEPS
        for first, last, work in self.documents():
            L[first:last] = first_rows(work, Ft, self.per_document[first:last], self.share, sweeps)
        return self.at(L, Ft, options)

    def _first_topics(self, k: int, options: FitOptions) -> Tensor:
        """Where one rank has all documents on its device, the start uses the passes over them that are there."""
        all_here = isinstance(self.counts, DeviceCounts) and not _several()
        everything = StartSample(self.documents, self.per_document.double(), self.per_term) if all_here else None
        how: dict[str, Any] = {"how": options.start, "seed": options.seed}
        return first_topics(self.counts, self.per_term, k, **how, device=self.device, everything=everything)

    def at(self, L: Tensor, Ft: Tensor, options: FitOptions) -> AcceleratedEM:
        """A fit that goes on from a point."""
        check = DENSE_CHECK if self.device.type == "cuda" and not self.counts.sparse else 1
        everyone = self.counts.documents if _several() else 0
        return AcceleratedEM(self.documents, L, Ft, options, check=check, all_documents=everyone)


def problem_of(counts: Counts, device: str | torch.device = "cpu", *, fractional: bool = False) -> Problem:
    """This rank's problem: of N ranks each takes the next N-th part of the documents."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if _several() else (0, 1)
    start, stop = part_of(counts.documents, rank, world)
    if isinstance(counts, DeviceCounts):
        device, there = counts.device, counts.part(start, stop)
        per_document, own = sums_of(there)
    else:
        device, there = torch.device(device), None
        sums = totals(counts, start, stop, fractional=fractional)
        per_document, own = (torch.from_numpy(part).to(device) for part in sums)
    per_term = own.clone()
    if _several():
        dist.all_reduce(per_term)
    total = float(per_term.sum())
    if not total:
        raise UserError(f"all {counts.documents:,} x {counts.terms:,} counts are zero: there is nothing to learn")
    if not total < LARGEST:
        raise UserError(f"the counts add up to {total:.3g}; divide them so that it is below {LARGEST:g}")
    per_document, share = per_document.float(), (per_term / total).float()
    if there is not None:
        documents = passes_of(there, per_document, own, share)
    else:
        documents = _reader(counts, (start, stop), per_document, share)
    return Problem(counts, per_document, per_term, share, device, documents)


def part_of(documents: int, rank: int, world: int) -> tuple[int, int]:
    """The documents of a rank: parts of equal size, of which the last may be smaller."""
    size = -(-documents // world)
    return min(documents, rank * size), min(documents, (rank + 1) * size)


def check_topics(k: Any, counts: Counts) -> None:
    most = min(counts.documents, counts.terms, MOST_TOPICS)
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or not 1 <= k <= most:
        what = f"{counts.documents:,} documents and {counts.terms:,} terms"
        raise UserError(f"k={k} topics for {what}: give a whole number from 1 to {most}")


def _reader(counts: Counts, rows: tuple[int, int], per_document: Tensor, share: Tensor) -> ReadPasses:
    start, stop = rows
    if share.device.type == "cuda":
        return Tiers(counts, per_document, share, share.device, rows).steps
    if counts.resident:
        whole: list[RangePass] = [(0, stop - start, cpu_pass(counts.block(start, stop), share))]
        return lambda: whole if stop > start else []

    def streamed() -> Iterator[RangePass]:
        block_bytes = SCANNED_BYTES if scans(counts) else CORE_BLOCK_BYTES
        for block in blocks(counts, start, stop, block_bytes, without_zeros=True):
            yield block.start - start, block.stop - start, cpu_pass(block, share)

    return streamed


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()
