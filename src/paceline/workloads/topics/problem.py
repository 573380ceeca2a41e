"""One rank's part of a fit: its documents, where their counts are kept, and the first point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import UserError
from paceline.workloads.topics.blocks import Counts
from paceline.workloads.topics.device import Pass
from paceline.workloads.topics.engine import Documents, Fit, Stop
from paceline.workloads.topics.on_device import DeviceCounts
from paceline.workloads.topics.rows import cpu_pass
from paceline.workloads.topics.sizes import SCANNED_BYTES, STREAM_BYTES
from paceline.workloads.topics.start import FEW_SWEEPS, SWEEPS, Some, first_rows, first_topics
from paceline.workloads.topics.stream import blocks, scans
from paceline.workloads.topics.totals import totals

Tensor = Any  # torch.Tensor; torch is not typed here
MOST_TOPICS = 512
LARGEST = 1e30
DENSE_CHECK = 5  # passes over dense counts on a device for one loss


@dataclass(frozen=True)
class Problem:
    """The documents start..stop of some counts, for one device. `share` is what each term is of all counts."""

    counts: Counts
    start: int
    stop: int
    per_document: Tensor  # float32, of these documents
    per_term: Tensor  # float64, of all documents
    share: Tensor  # float32
    device: torch.device
    documents: Documents

    def begin(self, k: int, *, start: str, seed: int, rows: str, stop: Stop) -> Fit:
        """The first point: topics of a sample, the same on every rank, and rows of L for them."""
        Ft = torch.empty(self.counts.terms, k, device=self.device)
        if not _several() or dist.get_rank() == 0:
            Ft = self._first_topics(k, start, seed)
        if _several():
            dist.broadcast(Ft, 0)
        L = torch.empty(self.stop - self.start, k, device=self.device)
        sweeps = FEW_SWEEPS if self.counts.sparse and self.device.type == "cpu" else SWEEPS
        for first, last, work in self.documents():
            L[first:last] = first_rows(work, Ft, self.per_document[first:last], self.share, sweeps)
        return self.at(L, Ft, rows=rows, stop=stop)

    def _first_topics(self, k: int, how: str, seed: int) -> Tensor:
        """Where one rank has all documents on its device, the start uses the passes over them that are there."""
        all_here = isinstance(self.counts, DeviceCounts) and not _several()
        everything = Some(self.documents, self.per_document.double(), self.per_term) if all_here else None
        return first_topics(
            self.counts, self.per_term, k, how=how, seed=seed, device=self.device, everything=everything
        )

    def at(self, L: Tensor, Ft: Tensor, *, rows: str, stop: Stop) -> Fit:
        """A fit that goes on from a point."""
        check = DENSE_CHECK if self.device.type == "cuda" and not self.counts.sparse else 1
        everyone = self.counts.documents if _several() else 0
        return Fit(self.documents, L, Ft, stop, rows, check=check, all_documents=everyone)


def problem_of(counts: Counts, device: str | torch.device = "cpu", *, fractional: bool = False) -> Problem:
    """This rank's problem: of N ranks each takes the next N-th part of the documents."""
    device = counts.device if isinstance(counts, DeviceCounts) else torch.device(device)
    rank, world = (dist.get_rank(), dist.get_world_size()) if _several() else (0, 1)
    start, stop = part_of(counts.documents, rank, world)
    there = counts.part(start, stop) if isinstance(counts, DeviceCounts) else None
    per_document, own = _sums(counts, start, stop, fractional, device) if there is None else there.sums()
    per_term = own.clone()
    if _several():
        dist.all_reduce(per_term)
    total = float(per_term.sum())
    if not total:
        raise UserError(f"all {counts.documents:,} x {counts.terms:,} counts are zero: there is nothing to learn")
    if not total < LARGEST:
        raise UserError(f"the counts add up to {total:.3g}; divide them so that it is below {LARGEST:g}")
    per_document, share = per_document.float(), (per_term / total).float()
    if there is None:
        documents = _reader(counts, start, stop, per_document, share, device)
    else:
        documents = there.passes(per_document, own, share)
    return Problem(counts, start, stop, per_document, per_term, share, device, documents)


def _sums(counts: Counts, start: int, stop: int, fractional: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    found = totals(counts, start, stop, fractional=fractional)
    return torch.from_numpy(found.per_document).to(device), torch.from_numpy(found.per_term).to(device)


def part_of(documents: int, rank: int, world: int) -> tuple[int, int]:
    """The documents of a rank: parts of equal size, of which the last may be smaller."""
    size = -(-documents // world)
    return min(documents, rank * size), min(documents, (rank + 1) * size)


def check_topics(k: Any, counts: Counts) -> None:
    most = min(counts.documents, counts.terms, MOST_TOPICS)
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or not 1 <= k <= most:
        what = f"{counts.documents:,} documents and {counts.terms:,} terms"
        raise UserError(f"k={k} topics for {what}: give a whole number from 1 to {most}")


def _reader(
    counts: Counts, start: int, stop: int, per_document: Tensor, share: Tensor, device: torch.device
) -> Documents:
    if device.type == "cuda":
        from paceline.workloads.topics.tiers import Tiers

        return Tiers(counts, per_document, share, device, start=start, stop=stop).steps
    if counts.resident:
        whole: list[tuple[int, int, Pass]] = [(0, stop - start, cpu_pass(counts.block(start, stop), share))]
        return lambda: whole if stop > start else []
    return partial(_streamed, counts, start, stop, share)


def _streamed(counts: Counts, start: int, stop: int, share: Tensor) -> Iterable[tuple[int, int, Pass]]:
    for block in blocks(counts, start, stop, SCANNED_BYTES if scans(counts) else STREAM_BYTES, without_zeros=True):
        yield block.start - start, block.stop - start, cpu_pass(block, share)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()
