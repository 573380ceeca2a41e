"""A pass over documents on a device: their rows of L are updated, and the statistic for F is added up, in one read.

`make_pass` brings one block of counts to the device. With Triton the counts stay in their small type and L F is never
written to memory; without it the same arithmetic runs in plain torch, slower.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from typing import Any, Protocol

import numpy as np
import torch

from paceline.topics.blocks import Block, Csr

Tensor = Any  # torch.Tensor; torch is not typed here
PAD = 256  # dense counts are padded to multiples of it: whole tiles, whatever their size
PIECE = 1 << 26  # elements of dense counts that plain torch turns to float32 at a time
NEWTON_K = 64  # beyond it the quadratic model of one document no longer fits into registers: EM


class Pass(Protocol):
    """One read of some documents. `L` (rows, k) is updated in place; `S` (terms, k) gets sum_i x_ij / p_ij l_i added.

    `rows` is "em" (S from the rows before the update) or "newton" (S from the updated rows; dense counts and many
    topics take EM steps under this name too, with S from the rows before). Returns the sum of -x log p at the incoming
    L and F, a float64 tensor on the device; nothing waits for the device. Without `loss` it is zero, and costs nothing.
    """

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor: ...

    def multiply(self, B: Tensor) -> Tensor: ...  # X @ B for these documents

    def multiply_t(self, C: Tensor) -> Tensor: ...  # X.T @ C


def triton_runs_on(device: Any) -> bool:
    """Whether kernels can run: on a CUDA device, or on the CPU under Triton's interpreter, for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.device(device).type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def make_pass(block: Block, per_document: Tensor, q: Tensor, device: Any) -> Pass:
    """The pass over one block, its counts copied to `device`.

    `per_document` are the counts of the block's documents, `q` the shares of the terms in the counts of all documents.
    """
    device = torch.device(device)
    per_document = torch.as_tensor(per_document).to(device, torch.float32)
    share = torch.as_tensor(q).to(device, torch.float32).clamp_min(1e-30)
    if device.type == "cuda" and not triton_runs_on(device):
        say_plain()
    if isinstance(block.values, Csr):
        csr = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in block.parts)
        csr = tuple(part.to(device, non_blocking=True) for part in csr)
        return SparsePass(csr, per_document, share) if triton_runs_on(device) else PlainSparse(csr, share)
    if triton_runs_on(device):
        return DensePass(upload(block.values, device), per_document, share)
    return PlainDense(torch.from_numpy(block.values).to(device))


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Dense counts on the device, padded with zeros to whole tiles."""
    rows, terms = values.shape
    counts = torch.zeros(padded(rows), padded(terms), dtype=torch.from_numpy(values[:0]).dtype, device=device)
    copy_rows(values, counts[:rows, :terms])
    return counts


def padded(size: int) -> int:
    return -(-size // PAD) * PAD


def copy_rows(values: np.ndarray, there: Tensor) -> None:
    """In pieces: a copy between matrices of different widths takes the device's memory twice."""
    step = max(1, PIECE // values.shape[1])
    for first in range(0, len(values), step):
        piece = torch.from_numpy(values[first : first + step]).to(there.device, non_blocking=True)
        there[first : first + len(piece)] = piece


class DensePass:
    """Dense counts, padded and on the device. Newton steps are not worth their k x k model here: all steps are EM."""

    def __init__(self, counts: Tensor, per_document: Tensor, share: Tensor, tile: Any = None) -> None:
        self.counts, self.share, self.tile = counts, share, tile
        self.rows, self.tokens = len(per_document), per_document.double().sum()

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        from paceline.topics import triton_calls as calls

        X = self.counts
        table = (Ft / self.share[:, None]).clamp(calls.FLOOR, calls.LARGEST)
        u = calls.operand(L * calls.SCALE, X.shape[0], X, empty=calls.SCALE)
        v = calls.operand(table, X.shape[1], X, empty=1.0)
        tile = self.tile or calls.dense_tile(X, L.shape[1])
        own, other, logs = calls.dense_statistics(X, u, v, loss=loss, tile=tile)
        S.add_(other[: len(S), : S.shape[1]] / self.share[:, None])
        keep_or_normalise(L, L * own[: len(L), : L.shape[1]])
        if not loss:
            return _zero(L.device)
        scaled = math.log(2) * (logs.double().sum() - math.log2(calls.SCALE) * self.tokens)
        return -(scaled + self.of_shares)

    @functools.cached_property
    def of_shares(self) -> Tensor:
        """sum x log q: what the kernels leave out of the loss."""
        per_term = torch.zeros(self.counts.shape[1], device=self.counts.device, dtype=torch.float64)
        for piece in self.counts.split(max(1, PIECE // self.counts.shape[1])):
            exact = torch.float32 if self.counts.dtype == torch.uint8 else torch.float64
            per_term += piece.to(exact).sum(0)
        return per_term[: len(self.share)] @ self.share.double().log()

    def multiply(self, B: Tensor) -> Tensor:
        from paceline.topics.triton_calls import dense_product

        return dense_product(self.counts, B, transposed=False)[: self.rows]

    def multiply_t(self, C: Tensor) -> Tensor:
        from paceline.topics.triton_calls import dense_product

        return dense_product(self.counts, C, transposed=True)[: len(self.share)]


class SparsePass:
    """Rows of nonzeros on the device. `by_terms`: also kept in the order of the terms, and S is added up from there;
    else by atomics, in the same pass over the rows."""

    def __init__(self, csr: Any, per_document: Tensor, share: Tensor, *, by_terms: bool = False) -> None:
        self.csr, self.per_document, self.share = csr, per_document, share
        self.items = None
        if by_terms:
            from paceline.topics import triton_calls

            self.items = triton_calls.by_terms(csr, len(share))

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        from paceline.topics import triton_calls as calls

        k = L.shape[1]
        newton = rows == "newton" and k <= NEWTON_K
        table = calls.full_operand(Ft / self.share[:, None])
        padded_S = torch.zeros_like(table)
        if self.items is not None and not newton:
            calls.sparse_statistic(self.items, L, table, padded_S)
        in_pass = padded_S if self.items is None else None
        logs = calls.sparse_update(self.csr, L, table, in_pass, self.per_document, newton=newton, loss=loss)
        if self.items is not None and newton:
            calls.sparse_statistic(self.items, L, table, padded_S)
        S.add_(padded_S[:, :k] / self.share[:, None])
        return -(logs.double().sum() + self.of_shares) if loss else _zero(L.device)

    @functools.cached_property
    def of_shares(self) -> Tensor:
        """sum x log q: what the kernels leave out of the loss."""
        _, index, count = self.csr
        log_share = self.share.double().log()
        pieces = zip(index.split(PIECE), count.split(PIECE), strict=True)
        return sum((x.double() @ log_share[j] for j, x in pieces), start=_zero(index.device))

    def multiply(self, B: Tensor) -> Tensor:
        from paceline.topics.triton_calls import sparse_product

        return sparse_product(self.csr, B)

    def multiply_t(self, C: Tensor) -> Tensor:
        from paceline.topics.triton_calls import sparse_spread

        return sparse_spread(self.csr, C, len(self.share))


class PlainDense:
    """Dense counts in plain torch: R = X / (L F) for some documents at a time, then two products."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.step = max(1, PIECE // max(1, counts.shape[1]))

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        total = _zero(L.device)
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
    """Rows of nonzeros in plain torch, EM steps only."""

    def __init__(self, csr: Any, share: Tensor) -> None:
        pointer, index, count = csr
        self.rows, self.terms, self.index, self.count = len(pointer) - 1, len(share), index, count.float()
        self.row = torch.repeat_interleave(torch.arange(len(pointer) - 1, device=index.device), pointer.diff())

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        total = _zero(L.device)
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
    """Rows of `new`, made to sum to one, into L; a document without counts keeps its row."""
    norm = new.sum(1, keepdim=True)
    L.copy_(torch.where(norm > 0, new / norm.clamp_min(1e-30), L))


def _zero(device: Any) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


@functools.cache
def say_plain() -> None:
    print(
        "topics: Triton is not installed; plain torch, about 10 times slower. Type: pip install triton", file=sys.stderr
    )
