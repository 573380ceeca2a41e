"""Passes over documents: update their rows of L and sum the statistic of F, in one read.

`make_pass` copies one block of counts to the device. With Triton the counts stay in their small type and L F is never
written to memory; without it, and on CPU cores, the same arithmetic runs in plain torch, slower.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from paceline.io.terminal import warn
from paceline.workloads.topics.counts.arrays import PIECE
from paceline.workloads.topics.counts.matrices import Csr, DocumentBlock
from paceline.workloads.topics.sizes import NEWTON_TOPICS, pad_to_tile

Tensor = Any  # torch.Tensor; torch is not typed here
MANY = 1 << 20  # dense documents whose sums for the terms are added up in one float32
LEAST_SHARE = 1e-30


class MatrixProducts(Protocol):
    def multiply(self, B: Tensor) -> Tensor: ...  # X @ B
    def multiply_t(self, C: Tensor) -> Tensor: ...  # X.T @ C


class DocumentPass(MatrixProducts, Protocol):
    """One read of some documents. `L` (rows, k) is updated in place; `S` (terms, k) gets sum_i x_ij / p_ij l_i added.

    `rows` is "em" (S from the rows before the update) or "newton" (S from the updated rows; dense counts and many
    topics take EM steps under this name too, with S from the rows before). Returns the sum of -x log p at the incoming
    L and F as a float64 tensor, without waiting for the device; 0 without `loss`.
    """

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor: ...


RangePass = tuple[int, int, DocumentPass]
"""(first row, last row, pass) of some of a rank's documents."""
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
    """Make the pass over one block, its counts copied to `device`.

    `per_document` are the counts of the block's documents, `q` the shares of the terms in the counts of all documents.
    """
    device = torch.device(device)
    per_document, share = (torch.as_tensor(part).to(device, torch.float32) for part in (per_document, q))
    if isinstance(block.values, Csr):
        csr = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in block.parts)
        return make_device_pass(tuple(part.to(device, non_blocking=True) for part in csr), per_document, share)
    if not can_run_triton(device):
        return make_device_pass(torch.from_numpy(block.values).to(device), per_document, share)
    return DensePass(upload_dense(block.values, device), per_document, share.clamp_min(LEAST_SHARE))


def import_triton_calls() -> Any:
    from paceline.workloads.topics.fitting import triton_calls as calls

    return calls


def make_device_pass(values: Any, per_document: Tensor, share: Tensor, per_term: Tensor | None = None) -> DocumentPass:
    """Make the pass over counts on their device: rows, or the three parts of CSR.

    `per_term` are the sums of these counts, where they are known.
    """
    device, share = per_document.device, share.clamp_min(LEAST_SHARE)
    kernels = can_run_triton(device)
    if device.type == "cuda" and not kernels:
        warn_slow_fallback("Triton", 10, "triton")
    if isinstance(values, tuple):
        return SparsePass(values, per_document, share, per_term) if kernels else PlainSparse(values, share)
    return DensePass(pad_to_tiles(values), per_document, share, per_term) if kernels else PlainDense(values)


class DensePass:
    """Dense counts, padded and on the device. All steps are EM: a Newton step is not worth its k x k model here.

    The operands are halves. The loss is that of the rounded rows, normalised again: near an optimum it differs from the
    exact one by the square of the rounding.
    """

    def __init__(
        self, counts: Tensor, per_document: Tensor, share: Tensor, per_term: Tensor | None = None, tile: Any = None
    ) -> None:
        self.counts, self.share, self.per_term, self.tile = counts, share, per_term, tile
        self.per_document, self.rows, self.tokens = per_document, len(per_document), per_document.double().sum()

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        calls = import_triton_calls()
        k, (_, width) = L.shape[1], self.counts.shape
        table = (Ft / self.share[:, None]).clamp(calls.FLOOR, calls.LARGEST)
        v = calls.make_operand(table, width, self.counts, empty=1.0)
        tile = self.tile or calls.choose_tile(self.counts, k, loss)
        total, parts = zero_loss(L.device), (part.split(MANY) for part in (self.counts, L, self.per_document))
        seen = (self.share > LEAST_SHARE).float()
        mass, rounded = seen @ Ft, (seen * self.share) @ v[: len(Ft)].float()  # of the topics, exact and rounded
        for X, some, lengths in zip(*parts, strict=True):
            u = calls.make_operand(some * calls.SCALE, len(X), X, empty=calls.SCALE)
            own, other, logs = calls.compute_dense_statistics(X, u, v, loss=loss, tile=tile)
            S.add_(other[: len(S), :k] / self.share[:, None])
            if loss:
                size = (u[: len(some)].float() @ rounded) / (some @ mass * calls.SCALE)
                total += logs.sum(dtype=torch.float64) - lengths.double() @ size.log2().double()
            keep_or_normalise(some, some * own[: len(some), :k])
        if not loss:
            return total
        return -(math.log(2) * (total - math.log2(calls.SCALE) * self.tokens) + self.of_shares)

    @functools.cached_property
    def of_shares(self) -> Tensor:
        """sum x log q, which the kernels leave out of the loss."""
        per_term = sum_dense(self.counts)[1] if self.per_term is None else self.per_term
        return per_term[: len(self.share)] @ self.share.double().log()

    def multiply(self, B: Tensor) -> Tensor:
        return import_triton_calls().multiply_dense(self.counts, B, transposed=False)[: self.rows]

    def multiply_t(self, C: Tensor) -> Tensor:
        return import_triton_calls().multiply_dense(self.counts, C, transposed=True)[: len(self.share)]


class SparsePass:
    """Rows of nonzeros on the device, and the same nonzeros sorted by term, from which S is summed.

    Atomics in the pass over the rows would take many times as long, and lose the last of many documents.
    """

    def __init__(self, csr: Any, per_document: Tensor, share: Tensor, per_term: Tensor | None = None) -> None:
        self.csr, self.per_document, self.share, self.per_term = csr, per_document, share, per_term

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        calls = import_triton_calls()
        newton = rows == "newton" and L.shape[1] <= NEWTON_TOPICS
        table = calls.make_full_operand(Ft / self.share[:, None])
        sums = torch.zeros_like(table)
        if not newton:
            calls.add_sparse_statistic(self.by_terms, L, table, sums)
        logs = calls.update_sparse(self.csr, L, table, self.per_document, newton=newton, loss=loss)
        if newton:
            calls.add_sparse_statistic(self.by_terms, L, table, sums)
        S.add_(sums[:, : L.shape[1]] / self.share[:, None])
        return -(logs.sum(dtype=torch.float64) + self.of_shares) if loss else zero_loss(L.device)

    @functools.cached_property
    def by_terms(self) -> Any:
        return import_triton_calls().sort_by_terms(self.csr, len(self.share))

    @functools.cached_property
    def of_shares(self) -> Tensor:
        per_term = sum_sparse_terms(self.csr, len(self.share)) if self.per_term is None else self.per_term
        return per_term @ self.share.double().log()

    def multiply(self, B: Tensor) -> Tensor:
        return import_triton_calls().multiply_sparse(self.csr, B)

    def multiply_t(self, C: Tensor) -> Tensor:
        return import_triton_calls().multiply_sparse_t(self.by_terms, C, len(self.share))


class PlainDense:
    """Dense counts in plain torch: R = X / (L F) for some documents at a time, then two products."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.step = max(1, PIECE // max(1, counts.shape[1]))

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        total = zero_loss(L.device)
        for first in range(0, len(L), self.step):
            some = L[first : first + self.step]
            x = self.counts[first : first + self.step].float()
            p = (some @ Ft.T).clamp_min_(1e-30)
            if loss:
                total -= (x * p.log()).sum(dtype=torch.float64)
            r = x.div_(p)
            S.addmm_(r.T, some)
            keep_or_normalise(some, some * (r @ Ft))
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

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
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


def keep_or_normalise(L: Tensor, new: Tensor) -> None:
    """Copy the normalised rows of `new` to L; a document without counts keeps its row."""
    norm = new.sum(1, keepdim=True)
    L.copy_(torch.where(norm > 0, new / norm.clamp_min(1e-30), L))


def zero_loss(device: Any) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def can_run_triton(device: Any) -> bool:
    """Whether kernels can run: on a CUDA device, or on the CPU under Triton's interpreter (for tests)."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.device(device).type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def warn_slow_fallback(missing: str, times: int, install: str) -> None:
    warn(f"topics: {missing} is not installed; plain torch is about {times} times slower. Type: pip install {install}")


def upload_dense(values: np.ndarray, device: torch.device) -> Tensor:
    rows, terms = values.shape
    counts = torch.zeros(pad_to_tile(rows), pad_to_tile(terms), dtype=torch.from_numpy(values[:0]).dtype, device=device)
    copy_rows(values, counts[:rows, :terms])
    return counts


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


def sum_dense(counts: Tensor) -> tuple[Tensor, Tensor]:
    if can_run_triton(counts.device) and counts.dtype in (torch.uint8, torch.uint16):
        return import_triton_calls().sum_small_counts(counts)
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
