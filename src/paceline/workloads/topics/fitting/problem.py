"""One rank's part of a fit: its documents, where their counts are kept, and the first point.

A fit starts from topics of a sample, found by least squares or as the best of several tries. The sample depends on the
documents, k, the seed, CPU or device, and free device memory; topics agree because rank 0 broadcasts its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import InvalidData, InvalidValue
from paceline.workloads.topics.counts.arrays import DeviceCounts
from paceline.workloads.topics.counts.matrices import (
    Counts,
    Csr,
    DenseCounts,
    SparseCounts,
    join_rows,
    stack_arrays,
    to_dense,
)
from paceline.workloads.topics.counts.stream import compute_totals, iterate_blocks
from paceline.workloads.topics.fitting.engine import AcceleratedEM
from paceline.workloads.topics.fitting.least_squares import (
    TINY,
    SweepCounts,
    find_topics_by_least_squares,
    sweep_columns,
)
from paceline.workloads.topics.fitting.passes import DocumentPass, JoinedProducts, RangePass, ReadPasses, make_cpu_pass
from paceline.workloads.topics.fitting.tiers import (
    TieredDocuments,
    get_free_device_bytes,
    make_device_passes,
    sum_counts,
)
from paceline.workloads.topics.sections import FitOptions
from paceline.workloads.topics.sizes import CORE_BLOCK_BYTES, SCANNED_BYTES

Tensor = Any  # torch is not typed here
MAX_TOPICS = 512
LARGEST = 1e30
DENSE_CHECK = 5  # passes over dense counts on a device for one loss
RUNS = 64  # of consecutive documents, in a sample
TRIES = 2
SURPLUS = 3  # times k documents that a try begins with
FIRST_PASSES, EACH_PASSES, LAST_PASSES = 6, 3, 8
FEW_SWEEPS, SWEEPS = 10, 40  # of least squares for rows: few where they cost more than the passes they save
DEVICE_TURNS = SweepCounts(sample=1 << 62, on_sample=0, on_all=300)  # on all as fast as on a sample
MIX = 0.02  # of the average in every topic: no term is ruled out by the sample


@dataclass(frozen=True)
class FitProblem:
    """Some documents of counts, for one device. `share` is the share of each term in all counts."""

    counts: Counts
    per_document: Tensor  # float32, of these documents
    per_term: Tensor  # float64, of all documents
    share: Tensor  # float32
    device: torch.device
    documents: ReadPasses
    alone: bool  # no other rank has a part of these counts, even if there is a process group

    def begin(self, k: int, options: FitOptions) -> AcceleratedEM:
        """Return the fit at its start: topics found on rank 0 and broadcast to all ranks, and rows of L for them."""
        Ft = torch.empty(self.counts.terms, k, device=self.device)
        if self.alone or dist.get_rank() == 0:
            all_here = isinstance(self.counts, DeviceCounts) and self.alone
            everything = StartSample(self.documents, self.per_document.double(), self.per_term) if all_here else None
            Ft = find_first_topics(self.counts, self.per_term, k, options.start, options.seed, self.device, everything)
        if not self.alone:
            dist.broadcast(Ft, 0)
        L = torch.empty(len(self.per_document), k, device=self.device)
        sweeps = FEW_SWEEPS if self.counts.sparse and self.device.type == "cpu" else SWEEPS
        for first, last, work in self.documents():
            L[first:last] = find_first_rows(work, Ft, self.per_document[first:last], self.share, sweeps)
        return self.resume_at(L, Ft, options)

    def resume_at(self, L: Tensor, Ft: Tensor, options: FitOptions) -> AcceleratedEM:
        fit = AcceleratedEM(self.documents, L, Ft, options, 0 if self.alone else self.counts.documents)
        if self.device.type == "cuda" and not self.counts.sparse:
            fit.check = DENSE_CHECK
        return fit


def build_problem(counts: Counts, device: str | torch.device = "cpu", *, alone: bool = False) -> FitProblem:
    """Build this rank's problem: each of N ranks takes an N-th of the documents, unless it works `alone`."""
    alone = alone or not (dist.is_available() and dist.is_initialized())
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    start, stop = documents_of_rank(counts.documents, rank, world)
    if isinstance(counts, DeviceCounts):
        device, there = counts.device, counts.part(start, stop)
        per_document, own = sum_counts(there)
    else:
        device, there = torch.device(device), None
        per_document, own = (torch.from_numpy(part).to(device) for part in compute_totals(counts, start, stop))
    per_term = own.clone()
    if not alone:
        dist.all_reduce(per_term)
    total = float(per_term.sum())
    if not total:
        raise InvalidData(f"all {counts.documents:,} x {counts.terms:,} counts are zero")
    if not total < LARGEST:
        raise InvalidData(f"the counts add up to {total:.3g}; divide them to get below {LARGEST:g}")
    per_document, share = per_document.float(), (per_term / total).float()
    if there is not None:
        documents = make_device_passes(there, per_document, own, share)
    else:
        documents = _make_reader(counts, (start, stop), per_document, share)
    return FitProblem(counts, per_document, per_term, share, device, documents, alone)


def documents_of_rank(documents: int, rank: int, world: int) -> tuple[int, int]:
    size = -(-documents // world)
    return min(documents, rank * size), min(documents, (rank + 1) * size)


def check_topics(k: Any, counts: Counts) -> None:
    most = min(counts.documents, counts.terms, MAX_TOPICS)
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or not 1 <= k <= most:
        what = f"{counts.documents:,} documents and {counts.terms:,} terms"
        raise InvalidValue(f"k={k} topics for {what}: give a whole number from 1 to {most}", key="k")


def _make_reader(counts: Counts, rows: tuple[int, int], per_document: Tensor, share: Tensor) -> ReadPasses:
    start, stop = rows
    if share.device.type == "cuda":
        return TieredDocuments(counts, per_document, share, share.device, start, stop).steps
    if counts.resident:
        whole: list[RangePass] = [(0, stop - start, make_cpu_pass(counts.block(start, stop), share))]
        return lambda: whole if stop > start else []

    def streamed() -> Iterator[RangePass]:
        block_bytes = SCANNED_BYTES if hasattr(counts, "nonzero_rows") else CORE_BLOCK_BYTES
        for block in iterate_blocks(counts, start, stop, block_bytes, without_zeros=True):
            yield block.start - start, block.stop - start, make_cpu_pass(block, share)

    return streamed


@dataclass(frozen=True)
class SampleSize:
    nonzeros: int
    rows: int
    counts: int


FOR_CPU = SampleSize(300_000, 500, 50_000_000)
FOR_DEVICE = SampleSize(3_000_000, 5_000, 1_000_000_000)
COUNT_BYTES = 8  # of a dense sample on a device at most: four, and again in whole tiles


@dataclass(frozen=True)
class StartSample:
    """Documents to find first topics in: the passes over them, and their sums (float64)."""

    passes: ReadPasses
    per_document: Tensor
    per_term: Tensor


def find_first_topics(
    counts: Counts,
    per_term: Any,
    k: int,
    start: str = "auto",
    seed: int = 0,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - frozen
    everything: StartSample | None = None,
) -> Tensor:
    """Return the first F transposed (terms, k), each topic summing to 1; `everything`: all documents, on the device."""
    in_all = torch.as_tensor(per_term).to(device)
    if start == "random":  # the terms' shares, each times a random number for every topic
        random = torch.Generator().manual_seed(seed)
        Ft = torch.empty(counts.terms, k).exponential_(generator=random) * (in_all.cpu().float()[:, None] + 1e-3)
        return (Ft / Ft.sum(0)).to(device)
    size = FOR_CPU if device.type == "cpu" and not isinstance(counts, DeviceCounts) else FOR_DEVICE
    size = replace(size, counts=min(size.counts, get_free_device_bytes(device) // COUNT_BYTES))
    few, terms = _drop_unused_terms(sample_documents(counts, seed, least=2 * k, size=size))
    some = everything if few is counts and everything is not None else _load_sample(few, device)
    by_squares = start == "least_squares" or (start == "auto" and not few.sparse)
    by_squares = by_squares and k <= min(few.documents, few.terms)
    Ft = torch.zeros(counts.terms, k, device=device)
    if by_squares:
        work, turns = JoinedProducts(some.passes, few.terms), DEVICE_TURNS if device.type == "cuda" else SweepCounts()
        found = find_topics_by_least_squares(work, some.per_document, some.per_term, k, seed, turns)
    else:
        found = _start_by_race(some, k, seed)
    Ft[terms.to(device)] = found
    return Ft * (1 - MIX) + MIX * (in_all / in_all.sum()).float()[:, None]


def find_first_rows(
    work: DocumentPass, Ft: Tensor, per_document: Tensor, share: Tensor, sweeps: int = SWEEPS
) -> Tensor:
    """Return rows of L for given topics by weighted nonnegative least squares, in one read."""
    k = Ft.shape[1]
    weighted = torch.where(share[:, None] > 0, Ft / share.clamp_min(TINY)[:, None], torch.zeros_like(Ft))
    rows = torch.full((k, len(per_document)), 1 / k, device=Ft.device)
    target = work.multiply(weighted).T / per_document.clamp_min(TINY)
    sweep_columns(target.contiguous(), Ft.T @ weighted, rows, sweeps)
    size = rows.sum(0)[:, None]
    L = torch.where(size > 0, rows.T / size.clamp_min(TINY), torch.full_like(size, 1 / k))
    return ((1 - MIX) * L + MIX / k).contiguous()


def sample_documents(counts: Counts, seed: int, least: int = 1, size: SampleSize = FOR_CPU) -> Counts:
    """Return a sample of the documents, `least` or more, in memory: short runs, spread evenly over all."""
    if isinstance(counts, DeviceCounts) and not counts.sparse:
        return counts
    mean = max(1.0, float(counts.weights().mean()))
    rows = max(size.rows, int(size.nonzeros / mean)) if counts.sparse else int(size.counts / mean)
    rows = max(rows, least)
    if rows >= counts.documents:
        return counts if counts.resident else _load_parts([counts.block(0, counts.documents).values], counts.terms)
    runs = min(RUNS, rows)
    length = -(-rows // runs)
    stride = counts.documents / runs
    offset = np.random.default_rng(seed).random() * max(0.0, stride - length)
    starts = [int(i * stride + offset) for i in range(runs)]
    ranges = [(at, min(at + length, counts.documents)) for at in starts]
    if isinstance(counts, DeviceCounts):
        return counts.take_ranges(ranges)
    return _load_parts([counts.block(*some).values for some in ranges], counts.terms)


def _load_parts(parts: list[np.ndarray | Csr], terms: int) -> Counts:
    sparse = [values for values in parts if isinstance(values, Csr)]
    if len(sparse) == len(parts):
        return SparseCounts(join_rows(sparse), terms)
    return DenseCounts(stack_arrays([to_dense(values, terms) for values in parts]))


def _load_sample(few: Counts, device: torch.device) -> StartSample:
    if device.type == "cpu" and not isinstance(few, DeviceCounts):
        sums = [torch.from_numpy(part) for part in compute_totals(few)]
        whole = [(0, few.documents, make_cpu_pass(few.block(0, few.documents), sums[1]))]
        return StartSample(lambda: whole, *sums)
    there = few
    if not isinstance(there, DeviceCounts):
        block = few.block(0, few.documents)
        parts = tuple(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in block.parts)
        there = DeviceCounts(parts if isinstance(block.values, Csr) else parts[0], few.terms)
    per_document, per_term = sum_counts(there)
    share = (per_term / per_term.sum()).float()
    return StartSample(make_device_passes(there, per_document.float(), per_term, share), per_document, per_term)


def _start_by_race(some: StartSample, k: int, seed: int) -> Tensor:
    """Return the best of several tries, each a few passes over the sample.

    A try starts with a surplus of topics, documents half mixed with the average, and drops those with the fewest
    words, half of the surplus at a time: better optima than those of k random topics.
    """
    fits = []
    for number in range(TRIES):
        first = _start_from_documents(some, SURPLUS * k, 1000 * seed + number)
        fit = _run_passes(some, first, FIRST_PASSES)
        while (surplus := fit.L.shape[1] - k) > 0:
            left = surplus // 2
            L, Ft = fit.result()
            kept = (some.per_document.float() @ L).argsort(descending=True)[: k + left].sort().values
            L = L[:, kept] + 1e-3
            point = L / L.sum(1, keepdim=True), Ft[:, kept].contiguous()
            fit = _run_passes(some, point, EACH_PASSES if left else LAST_PASSES, accelerate=not left)
        fits.append(fit)
    return min(fits, key=lambda fit: min(fit.losses)).result()[1]


def _start_from_documents(some: StartSample, k: int, seed: int) -> tuple[Tensor, Tensor]:
    share = (some.per_term / some.per_term.sum()).float()
    length = some.per_document.cpu().numpy()
    longer = np.flatnonzero(length >= np.median(length[length > 0]))
    chosen = np.random.default_rng(seed).choice(longer, k, replace=len(longer) < k)
    only = torch.zeros(len(length), k)
    only[torch.from_numpy(chosen), torch.arange(k)] = 1.0
    rows = JoinedProducts(some.passes, len(share)).multiply_t(only.to(share.device))
    Ft = rows / some.per_document[torch.from_numpy(chosen).to(share.device)].float()
    return torch.full((len(length), k), 1 / k, device=share.device), 0.5 * Ft + 0.5 * share[:, None]


def _run_passes(some: StartSample, point: tuple[Tensor, Tensor], count: int, accelerate: bool = False) -> AcceleratedEM:
    fit = AcceleratedEM(some.passes, *point, FitOptions())
    fit.accelerate = accelerate
    for _ in range(count):
        fit.step()
    return fit


def _drop_unused_terms(few: Counts) -> tuple[Counts, Tensor]:
    """Return a sparse sample without the terms that it does not use, and the numbers of the others."""
    values = None if isinstance(few, DeviceCounts) else few.block(0, few.documents).values
    if not isinstance(values, Csr):
        return few, torch.arange(few.terms)
    used = np.zeros(few.terms, bool)
    used[values.indices] = True
    terms = np.flatnonzero(used)
    indices = (np.cumsum(used) - 1).astype(np.int32)[values.indices]
    return SparseCounts(replace(values, indices=indices), len(terms)), torch.from_numpy(terms)
