"""Passes over documents: update their rows of L and sum the statistic of F, in one read.

With Triton the counts stay in their small type and L F is never written to memory; CPU cores work on sparse counts by
compiled loops and on dense ones by matrix products; plain torch does the same arithmetic, slower.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from paceline.io.terminal import warn
from paceline.workloads.topics.counts.arrays import PIECE
from paceline.workloads.topics.counts.matrices import Csr, DocumentBlock
from paceline.workloads.topics.sizes import pad_core_topics, pad_to_tile

Tensor = Any  # torch is not typed here
LEAST_SHARE = 1e-30
FEW = 4096  # documents whose statistic is summed in float32, which loses the last of many
Arrays = tuple[np.ndarray, ...]
DENSE_STEP = 1 << 18  # counts that are worked on at a time: they stay in the cache


class MatrixProducts(Protocol):
    def multiply(self, B: Tensor) -> Tensor: ...  # X @ B
    def multiply_t(self, C: Tensor) -> Tensor: ...  # X.T @ C


class DocumentPass(MatrixProducts, Protocol):
    """One read of some documents: an EM step of their rows of L.

    `L` (rows, k) is updated in place; `S` (terms, k) gets sum_i x_ij / p_ij l_i added, of the rows before the update.
    Returns the sum of -x log p at the incoming L and F, float64; 0 without `loss`.
    """

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, loss: bool = True) -> Tensor: ...


RangePass = tuple[int, int, DocumentPass]  # (first row, last row, pass) of some of a rank's documents
ReadPasses = Callable[[], Iterable[RangePass]]
"""Return the passes over a rank's documents; called once for every pass over all of them."""


class JoinedProducts:
    def __init__(self, documents: ReadPasses, terms: int) -> None:
        self.documents, self.terms = documents, terms

    def multiply(self, B: Tensor) -> Tensor:
        return torch.cat([step.multiply(B) for _, _, step in self.documents()])

    def multiply_t(self, C: Tensor) -> Tensor:
        total = torch.zeros(self.terms, C.shape[1], device=C.device)
        for first, last, step in self.documents():
            total += step.multiply_t(C[first:last])
        return total


def make_pass(block: DocumentBlock, per_document: Tensor, q: Tensor, device: Any) -> DocumentPass:
    """Return the pass over one block, its counts copied to `device`.

    `per_document` are the counts of the block's documents, `q` the shares of the terms in the counts of all documents.
    """
    device = torch.device(device)
    per_document, share = (torch.as_tensor(part).to(device, torch.float32) for part in (per_document, q))
    if isinstance(block.values, Csr):
        csr = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in block.parts)
        return make_device_pass(tuple(part.to(device, non_blocking=True) for part in csr), per_document, share)
    if not can_run_triton(device):
        return make_device_pass(torch.from_numpy(block.values).to(device), per_document, share)
    rows, terms = block.values.shape
    dtype = torch.from_numpy(block.values[:0]).dtype
    counts = torch.zeros(pad_to_tile(rows), pad_to_tile(terms), dtype=dtype, device=device)
    copy_rows(block.values, counts[:rows, :terms])
    return make_device_pass(counts, per_document, share)


def make_cpu_pass(block: DocumentBlock, share: Tensor) -> DocumentPass:
    """Return the pass over one block, on as many threads as torch uses."""
    if not isinstance(block.values, Csr):
        return CoreDensePass(torch.from_numpy(block.values))
    return CoreSparsePass(block.values, len(share))


def make_device_pass(values: Any, per_document: Tensor, share: Tensor, per_term: Tensor | None = None) -> DocumentPass:
    """Return the pass over counts on their device: rows, or the three parts of CSR.

    `per_term` are the sums of these counts, where they are known.
    """
    share = share.clamp_min(LEAST_SHARE)
    if can_run_triton(per_document.device):
        from paceline.workloads.topics.fitting.triton_passes import DensePass, SparsePass

        if isinstance(values, tuple):
            return SparsePass(values, share, per_term)
        return DensePass(pad_to_tiles(values), per_document, share, per_term)
    if per_document.is_cuda:
        warn_without_triton()
    return PlainSparse(values, share) if isinstance(values, tuple) else PlainDense(values)


class PlainDense:
    """Dense counts in plain torch: R = X / (L F) for some documents at a time, then two products."""

    numbers = PIECE  # that are worked on at a time

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.step = min(len(counts), max(1, self.numbers // counts.shape[1]))

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, loss: bool = True) -> Tensor:
        return self.work_on_rows(0, len(L), L, Ft, S, loss)

    def work_on_rows(self, start: int, stop: int, L: Tensor, Ft: Tensor, S: Tensor, loss: bool) -> Tensor:
        F, total = Ft.T.contiguous(), zero_loss(L.device)
        x_room, p_room = (torch.empty(self.step, len(Ft), device=L.device) for _ in range(2))
        for first in range(start, stop, self.step):
            last = min(stop, first + self.step)
            rows_L = L[first:last]
            x, p = x_room[: len(rows_L)], p_room[: len(rows_L)]
            x.copy_(self.counts[first:last])
            torch.mm(rows_L, F, out=p).clamp_min_(1e-30)
            r = torch.div(x, p, out=x) if not loss else x.div(p)
            if loss:
                total -= p.log_().mul_(x).sum(dtype=torch.float64)
            S.addmm_(r.T, rows_L)
            keep_or_normalise(rows_L, rows_L * (r @ Ft))
        return total

    def multiply(self, B: Tensor) -> Tensor:
        return torch.cat([x.float() @ B for x in self.counts.split(self.step)])

    def multiply_t(self, C: Tensor) -> Tensor:
        pieces = zip(self.counts.split(self.step), C.split(self.step), strict=True)
        return sum((x.float().T @ c for x, c in pieces), start=torch.zeros((), device=C.device))


class PlainSparse:
    def __init__(self, csr: Any, share: Tensor) -> None:
        pointer, index, count = csr
        self.rows, self.terms, self.index, self.count = len(pointer) - 1, len(share), index, count.float()
        self.row = torch.repeat_interleave(torch.arange(len(pointer) - 1, device=index.device), pointer.diff())

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, loss: bool = True) -> Tensor:
        total = zero_loss(L.device)
        G = torch.zeros_like(L)
        step = max(1, PIECE // L.shape[1])
        for i, j, x in zip(self.row.split(step), self.index.split(step), self.count.split(step), strict=True):
            some, f = L[i], Ft[j]
            p = (some * f).sum(1).clamp_min(1e-30)
            if loss:
                total -= (x * p.log()).sum(dtype=torch.float64)
            r = (x / p)[:, None]
            S.index_add_(0, j, r * some)
            G.index_add_(0, i, r * f)
        keep_or_normalise(L, L * G)
        return total

    def multiply(self, B: Tensor) -> Tensor:
        out = torch.zeros(self.rows, B.shape[1], device=B.device)
        return out.index_add_(0, self.row, B[self.index] * self.count[:, None])

    def multiply_t(self, C: Tensor) -> Tensor:
        out = torch.zeros(self.terms, C.shape[1], device=C.device)
        return out.index_add_(0, self.index, C[self.row] * self.count[:, None])


class CoreDensePass(PlainDense):
    numbers = DENSE_STEP

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, loss: bool = True) -> Tensor:
        count = min(torch.get_num_threads(), -(-len(L) // self.step))
        if count <= 1:
            return self.work_on_rows(0, len(L), L, Ft, S, loss)
        ends = [len(L) * at // count for at in range(count + 1)]
        sums = [S, *(torch.zeros_like(S) for _ in range(count - 1))]

        def work(at: int) -> Tensor:
            return self.work_on_rows(ends[at], ends[at + 1], L, Ft, sums[at], loss)

        found = list(get_thread_pool(count).map(work, range(count)))
        for more in sums[1:]:
            S.add_(more)
        return sum(found[1:], found[0])


class CoreSparsePass:
    """Nonzeros of documents in memory. Each thread sums its own statistic."""

    def __init__(self, values: Csr, terms: int) -> None:
        self.values, self.terms = values, terms

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, loss: bool = True) -> Tensor:
        from paceline.workloads.topics.counts.numba_kernels import run_em_step

        k, table = L.shape[1], self._pad_topics(Ft)

        def work(csr: Arrays, shares: np.ndarray) -> tuple[float, Tensor]:
            sums = torch.zeros(table.shape, dtype=torch.float32 if len(shares) <= FEW else torch.float64)
            return run_em_step(*csr, shares, table, sums.numpy(), loss), sums

        found = self._on_threads(L, work)
        for _, sums in found:
            S.add_(sums[:, :k])
        return torch.tensor(sum(part for part, _ in found), dtype=torch.float64)

    def solve(self, L: Tensor, Ft: Tensor, steps: int, tolerance: float) -> float:
        """Solve rows of L for fixed topics, each until it has converged; return the sum of -x log p."""
        from paceline.workloads.topics.counts.numba_kernels import solve_rows

        table = self._pad_topics(Ft)
        return sum(self._on_threads(L, lambda csr, shares: solve_rows(*csr, shares, table, steps, tolerance)))

    def _on_threads(self, L: Tensor, work: Callable[[Arrays, np.ndarray], Any]) -> list[Any]:
        values, shares = self.values, L.numpy()

        def on(part: tuple[int, int]) -> Any:
            first, last = part
            return work((values.indptr[first : last + 1], values.indices, values.data), shares[first:last])

        parts = cut_evenly(values.indptr, torch.get_num_threads())
        return list(get_thread_pool(len(parts)).map(on, parts)) if len(parts) > 1 else [on(parts[0])]

    def _pad_topics(self, Ft: Tensor) -> np.ndarray:
        return torch.nn.functional.pad(Ft, (0, pad_core_topics(Ft.shape[1]) - Ft.shape[1])).contiguous().numpy()

    def multiply(self, B: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._scipy_matrix @ B.numpy()))

    def multiply_t(self, C: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._scipy_matrix.T @ C.numpy()))

    @functools.cached_property
    def _scipy_matrix(self) -> Any:
        import scipy.sparse

        parts = (self.values.data.astype(np.float32), self.values.indices, self.values.indptr)
        return scipy.sparse.csr_array(parts, shape=(len(self.values), self.terms))


def cut_evenly(indptr: np.ndarray, parts: int) -> list[tuple[int, int]]:
    rows = len(indptr) - 1
    goals = indptr[0] + (indptr[-1] - indptr[0]) * np.arange(1, parts) // parts
    at = [0, *np.searchsorted(indptr, goals).tolist(), rows]
    return [(first, last) for first, last in pairwise(at) if first < last] or [(0, rows)]


@functools.cache
def get_thread_pool(count: int) -> ThreadPoolExecutor:
    one = functools.partial(torch.set_num_threads, 1)  # of the thread that calls it
    return ThreadPoolExecutor(count, thread_name_prefix="paceline-topics", initializer=one)


def keep_or_normalise(L: Tensor, new: Tensor) -> None:
    """Copy the normalised rows of `new` to L; a document without counts keeps its row."""
    norm = new.sum(1, keepdim=True)
    L.copy_(torch.where(norm > 0, new / norm.clamp_min(1e-30), L))


def zero_loss(device: Any) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def can_run_triton(device: Any) -> bool:
    """Return whether Triton kernels can run: on a CUDA device, or on the CPU under Triton's interpreter (for tests)."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.device(device).type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def warn_without_triton() -> None:
    warn("topics: Triton is not installed; plain torch is about 10 times slower. Type: pip install triton")


def pad_to_tiles(values: Tensor) -> Tensor:
    """Pad dense counts on a device with zeros to whole tiles; not copied where they fill them."""
    if not tile_copy_bytes(values):
        return values
    rows, terms = values.shape
    counts = torch.empty(pad_to_tile(rows), pad_to_tile(terms), dtype=values.dtype, device=values.device)
    counts[rows:], counts[:, terms:] = 0, 0
    inside = counts[:rows, :terms]
    if terms * values.element_size() % 8 == 0:  # eight bytes at a time, which is several times as fast
        values, inside = values.view(torch.int64), inside.view(torch.int64)
    inside.copy_(values)
    return counts


def tile_copy_bytes(values: Tensor) -> int:
    rows, terms = values.shape
    if values.is_contiguous() and (pad_to_tile(rows), pad_to_tile(terms)) == (rows, terms):
        return 0
    return pad_to_tile(rows) * pad_to_tile(terms) * values.element_size()


def copy_rows(values: np.ndarray, target: Tensor) -> None:
    """Copy rows in pieces: a copy between matrices of different widths takes the device's memory twice."""
    step = max(1, PIECE // values.shape[1])
    for first in range(0, len(values), step):
        piece = torch.from_numpy(values[first : first + step]).to(target.device, non_blocking=True)
        target[first : first + len(piece)] = piece


def sum_dense_counts(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of dense counts (per document, per term) in float64, on their device."""
    if can_run_triton(counts.device) and counts.dtype in (torch.uint8, torch.uint16):
        from paceline.workloads.topics.fitting.triton_passes import sum_small_counts

        return sum_small_counts(counts)
    per_term = torch.zeros(counts.shape[1], dtype=torch.float64, device=counts.device)
    per_document = []
    for piece in counts.split(max(1, PIECE // 8 // counts.shape[1])):
        exact = piece.double()
        per_document.append(exact.sum(1))
        per_term += exact.sum(0)
    return torch.cat(per_document), per_term


def sum_sparse(csr: Any, terms: int) -> tuple[Tensor, Tensor]:
    pointer, _, count = csr
    step, per_document = PIECE // 8, torch.zeros(len(pointer) - 1, dtype=torch.float64, device=count.device)
    for number, piece in enumerate(count.split(step)):
        running = torch.nn.functional.pad(piece.double().cumsum(0), (1, 0))
        per_document += running[(pointer - number * step).clamp_(0, len(piece))].diff()
    return per_document, sum_sparse_terms(csr, terms)


def sum_sparse_terms(csr: Any, terms: int) -> Tensor:
    _, index, count = csr
    per_term = torch.zeros(terms, dtype=torch.float64, device=index.device)
    for j, x in zip(index.split(PIECE // 8), count.split(PIECE // 8), strict=True):
        per_term.index_add_(0, j, x.double())
    return per_term
