"""Passes over documents on CPU cores: sparse ones by compiled loops, dense ones by matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from paceline.workloads.topics.counts.matrices import Csr, DocumentBlock
from paceline.workloads.topics.counts.stream import has_numba
from paceline.workloads.topics.fitting.passes import (
    DocumentPass,
    PlainDense,
    PlainSparse,
    keep_or_normalise,
    warn_slow_fallback,
)
from paceline.workloads.topics.sizes import NEWTON_TOPICS, pad_core_topics

Tensor = Any  # torch.Tensor; torch is not typed here
FEW = 4096  # documents whose statistic is summed in float32, which loses the last of many
Arrays = tuple[np.ndarray, ...]
DENSE_STEP = 1 << 18  # counts that are worked on at a time: they stay in the cache


def make_cpu_pass(block: DocumentBlock, share: Tensor) -> DocumentPass:
    """Make the pass over one block, on as many threads as torch uses."""
    if not isinstance(block.values, Csr):
        return CoreDensePass(torch.from_numpy(block.values))
    if not has_numba():
        warn_slow_fallback("numba", 20, "numba")
        return PlainSparse(tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in block.parts), share)
    return CoreSparsePass(block.values, len(share))


class CoreDensePass(PlainDense):
    def __init__(self, counts: Tensor) -> None:
        super().__init__(counts)
        self.step = min(len(counts), max(1, DENSE_STEP // counts.shape[1]))

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        count = min(torch.get_num_threads(), -(-len(L) // self.step))
        if count <= 1:
            return self._part(0, len(L), L, Ft, S, loss)
        ends = [len(L) * at // count for at in range(count + 1)]
        sums = [S, *(torch.zeros_like(S) for _ in range(count - 1))]

        def work(at: int) -> Tensor:
            return self._part(ends[at], ends[at + 1], L, Ft, sums[at], loss)

        found = list(get_thread_pool(count).map(work, range(count)))
        for more in sums[1:]:
            S.add_(more)
        return sum(found[1:], found[0])

    def _part(self, start: int, stop: int, L: Tensor, Ft: Tensor, S: Tensor, loss: bool) -> Tensor:
        F = Ft.T.contiguous()
        x_room, p_room = (torch.empty(self.step, len(Ft)) for _ in range(2))
        total = torch.zeros((), dtype=torch.float64)
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


class CoreSparsePass:
    """Nonzeros of documents in memory. Each thread sums its own statistic."""

    def __init__(self, values: Csr, terms: int) -> None:
        self.values, self.terms = values, terms

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        from paceline.workloads.topics.counts.numba_kernels import run_em_step, run_newton_step

        k, table = L.shape[1], self._table(Ft)
        step = run_newton_step if rows == "newton" and k <= NEWTON_TOPICS else run_em_step

        def work(csr: Arrays, shares: np.ndarray) -> tuple[float, Tensor]:
            sums = torch.zeros(table.shape, dtype=torch.float32 if len(shares) <= FEW else torch.float64)
            return step(*csr, shares, table, sums.numpy(), loss), sums

        found = self._on_threads(L, work)
        for _, sums in found:
            S.add_(sums[:, :k])
        return torch.tensor(sum(part for part, _ in found), dtype=torch.float64)

    def solve(self, L: Tensor, Ft: Tensor, steps: int, tolerance: float) -> float:
        """Solve rows of L for fixed topics, each until it has converged; return the sum of -x log p."""
        from paceline.workloads.topics.counts.numba_kernels import solve_rows

        table = self._table(Ft)
        return sum(self._on_threads(L, lambda csr, shares: solve_rows(*csr, shares, table, steps, tolerance)))

    def _on_threads(self, L: Tensor, work: Callable[[Arrays, np.ndarray], Any]) -> list[Any]:
        values, shares = self.values, L.numpy()

        def on(part: tuple[int, int]) -> Any:
            first, last = part
            return work((values.indptr[first : last + 1], values.indices, values.data), shares[first:last])

        parts = cut_evenly(values.indptr, torch.get_num_threads())
        return list(get_thread_pool(len(parts)).map(on, parts)) if len(parts) > 1 else [on(parts[0])]

    def _table(self, Ft: Tensor) -> np.ndarray:
        return torch.nn.functional.pad(Ft, (0, pad_core_topics(Ft.shape[1]) - Ft.shape[1])).contiguous().numpy()

    def multiply(self, B: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._matrix @ B.numpy()))

    def multiply_t(self, C: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._matrix.T @ C.numpy()))

    @functools.cached_property
    def _matrix(self) -> Any:
        import scipy.sparse

        parts = (self.values.data.astype(np.float32), self.values.indices, self.values.indptr)
        return scipy.sparse.csr_array(parts, shape=(self.values.rows, self.terms))


def cut_evenly(indptr: np.ndarray, parts: int) -> list[tuple[int, int]]:
    rows = len(indptr) - 1
    goals = indptr[0] + (indptr[-1] - indptr[0]) * np.arange(1, parts) // parts
    at = [0, *np.searchsorted(indptr, goals).tolist(), rows]
    return [(first, last) for first, last in pairwise(at) if first < last] or [(0, rows)]


@functools.cache
def get_thread_pool(count: int) -> ThreadPoolExecutor:
    one = functools.partial(torch.set_num_threads, 1)  # of the thread that calls it
    return ThreadPoolExecutor(count, thread_name_prefix="paceline-topics", initializer=one)
