# mypy: disable-error-code="import-not-found,import-untyped"
"""Passes by the Triton kernels, their operands and tile sizes. Import it only where Triton is installed."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from paceline.errors import UserError
from paceline.workloads.topics.counts.arrays import take_elements
from paceline.workloads.topics.fitting import triton_kernels as kernels
from paceline.workloads.topics.fitting.passes import (
    LEAST_SHARE,
    keep_or_normalise,
    sum_dense_counts,
    sum_sparse_terms,
    zero_loss,
)
from paceline.workloads.topics.sizes import FUSED_TOPICS, pad_device_topics

Tensor = Any
Csr = tuple[Tensor, Tensor, Tensor]
Sides = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Padded counts, the operands of both sides, what is added up for both, and the losses: own side first."""
LARGEST_K = 512
SCALE = 64.0  # of the documents' operand, and
FLOOR = 2.0**-14  # the least F': together they keep 255 / p below the largest half
LARGEST = 6e4  # the largest F' that a half holds
PROGRAMS = 1056  # fewer leave parts of a large device idle: then the walk along the other side is split
PRODUCT_K = 64  # columns of one product
MANY = 1 << 20  # dense documents whose sums for the terms are added up in one float32


@dataclass(frozen=True)
class Tile:
    own: int
    other: int
    warps: int
    stages: int
    stagger: int = 29  # tiles of terms by which the next program begins later (fused pass of uint8 only)


# By topics, padded to a power of two. Halves: counts up to 255. Float32 (tf32 products): all other counts.
SIZES = (16, 32, 64, 128, 256, 512)
HALVES = ((128, 128, 4, 3), (128, 128, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2))
FULLS = ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1))
HALF_TILES, FULL_TILES = ({k: Tile(*tile) for k, tile in zip(SIZES, tiles, strict=True)} for tiles in (HALVES, FULLS))
LOSS_TILE = Tile(64, 128, 4, 3)  # halves and few topics: the logarithms need registers that a larger tile has not
SHARED_BYTES = 200 << 10  # what the tables above need; devices with less take these, save for halves and few topics
SMALL_HALF_TILE, SMALL_FULL_TILE = Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)
SUM_ROWS = 1024  # that one program adds up
PRODUCT_TILE = Tile(128, 64, 8, 2)
ROW_NONZEROS, ROW_WARPS = 32, 1
TERM_NONZEROS, TERM_WARPS = 64, 2


def pad_operand_topics(k: int) -> int:
    if k > LARGEST_K:
        raise UserError(f"{k} topics; at most {LARGEST_K}; use  --device cpu", code="not-supported", key="k")
    return pad_device_topics(k)


def choose_tile(counts: Tensor, k: int, loss: bool = False) -> Tile:
    half, K = counts.dtype == torch.uint8, pad_operand_topics(k)
    if half and loss and K <= FUSED_TOPICS:
        return LOSS_TILE
    if counts.is_cuda and (K > FUSED_TOPICS or not half):
        device: Any = torch.cuda.get_device_properties(counts.device)
        shared = device.shared_memory_per_block_optin
        if shared < SHARED_BYTES:
            return SMALL_HALF_TILE if half else SMALL_FULL_TILE
    return (HALF_TILES if half else FULL_TILES)[K]


def make_operand(rows: Tensor, size: int, counts: Tensor, *, empty: float) -> Tensor:
    """Return (size, K) in the type that `counts` need; rows beyond the last hold `empty`: no u v is zero."""
    dtype = torch.float16 if counts.dtype == torch.uint8 else torch.float32
    result = torch.zeros(size, pad_operand_topics(rows.shape[1]), device=rows.device, dtype=dtype)
    result[: len(rows), : rows.shape[1]] = rows if dtype == torch.float16 else round_to_tf32(rows)
    result[len(rows) :, : rows.shape[1]] = empty
    return result


def round_to_tf32(values: Tensor) -> Tensor:
    """Round to the 10 bits that a tf32 product reads: truncation would bias the loss."""
    return ((values.float().contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def compute_dense_statistics(
    counts: Tensor, u: Tensor, v: Tensor, *, loss: bool, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums that update documents and terms (rows, K), and the log2 terms of the loss per document.

    With p_ij = u[i] @ v[j]: sum_j x_ij / p_ij v[j], sum_i x_ij / p_ij u[i] and sum_j x_ij log2 p_ij, which is one zero
    without `loss`. Counts are padded to whole tiles, u and v are made by `make_operand`.
    """
    K = u.shape[1]
    own, other = torch.zeros_like(u, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    losses = torch.zeros(len(u) if loss else 1, device=u.device)
    if K <= FUSED_TOPICS and counts.dtype == torch.uint8:
        v = v.view(-1, 2, K).transpose(0, 1).contiguous()  # the even terms, then the odd ones
        _launch_pairs_kernel((counts, u, v, own, other, losses), tile, loss=loss)
        return own, other.view(2, -1, K).transpose(0, 1).reshape(-1, K), losses
    both = K <= FUSED_TOPICS
    _launch_dense_kernel((counts, u, v, own, other, losses), tile, both=both, loss=loss)
    if not both:
        _launch_dense_kernel((counts, v, u, other, own, losses), tile, terms=True)
    return own, other, losses


def sum_small_counts(counts: Tensor) -> tuple[Tensor, Tensor]:
    rows, terms = counts.shape
    per_document, per_term = (torch.zeros(size, dtype=torch.int64, device=counts.device) for size in (rows, terms))
    kernels.small_sums_kernel[(triton.cdiv(terms, 512), triton.cdiv(rows, SUM_ROWS))](
        counts.contiguous(), per_document, per_term, rows, terms, SUM_ROWS, BM=16, BN=512
    )
    return per_document.double(), per_term.double()


def multiply_dense(counts: Tensor, B: Tensor, *, transposed: bool) -> Tensor:
    """Return counts @ B, or counts.T @ B, for padded counts; B is not padded, the result is."""
    size, others = counts.shape[::-1] if transposed else counts.shape
    results = []
    for columns in B.split(PRODUCT_K, dim=1):
        scale = columns.abs().amax().clamp_min(1e-30)
        v = make_operand(columns / scale, others, counts, empty=0.0)
        own = torch.zeros(size, v.shape[1], device=v.device)
        _launch_dense_kernel((counts, own.to(v.dtype), v, own, own, own), PRODUCT_TILE, terms=transposed, ratio=False)
        results.append(own[:, : columns.shape[1]] * scale)
    return torch.cat(results, dim=1)


def _launch_pairs_kernel(sides: Sides, tile: Tile, *, loss: bool) -> None:
    counts, u, *others = sides
    pairs = counts.view(torch.int16)
    programs, splits, per_split = _choose_grid(len(u), pairs.shape[1], tile.own, tile.other // 2)
    kernels.accumulate_pairs[(programs, splits)](
        pairs, u, *others, pairs.shape[1], pairs.shape[1], per_split,
        WITH_LOSS=loss, FAST=supports_fast_path(counts), BM=tile.own, BN=tile.other // 2, K=u.shape[1],
        STAGES=tile.stages, STAGGER=tile.stagger, num_warps=tile.warps,
    )  # fmt: skip


def _launch_dense_kernel(
    sides: Sides, tile: Tile, *, terms: bool = False, ratio: bool = True, both: bool = False, loss: bool = False
) -> None:
    counts, u, v, *_ = sides
    programs, splits, per_split = _choose_grid(len(u), len(v), tile.own, tile.other)
    kernels.accumulate_dense[(programs, splits)](
        *sides, counts.shape[1], len(v), per_split,
        TERMS=terms, RATIO=ratio, BOTH=both, WITH_LOSS=loss, FAST=supports_fast_path(counts),
        BM=tile.own, BN=tile.other, K=u.shape[1], STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def _choose_grid(own: int, others: int, own_tile: int, other_tile: int) -> tuple[int, int, int]:
    programs, steps = own // own_tile, others // other_tile
    per_split = -(-steps // min(steps, -(-PROGRAMS // programs)))
    return programs, -(-steps // per_split), per_split * other_tile


def supports_fast_path(counts: Tensor) -> bool:
    return counts.is_cuda and torch.version.cuda is not None and counts.dtype == torch.uint8


def update_sparse(csr: Csr, L: Tensor, table: Tensor, *, loss: bool) -> Tensor:
    """Update L in place by EM; return sum_j x log p' per document."""
    losses = torch.zeros(len(L) if loss else 1, device=L.device)
    _sparse_rows(csr, L, table, losses, ratio=True, loss=loss)
    return losses


def multiply_sparse(csr: Csr, B: Tensor) -> Tensor:
    results = []
    for columns in B.split(PRODUCT_K, dim=1):
        out = torch.zeros(len(csr[0]) - 1, columns.shape[1], device=B.device)
        _sparse_rows(csr, out, make_full_operand(columns), out, ratio=False, loss=False)
        results.append(out)
    return torch.cat(results, dim=1)


def _sparse_rows(csr: Csr, L: Tensor, table: Tensor, losses: Tensor, *, ratio: bool, loss: bool) -> None:
    if len(L) == 0:
        return
    K = table.shape[1]
    many = max(16, min(ROW_NONZEROS, 8192 // K))
    kernels.update_sparse_rows[(len(L),)](
        *csr, L, table, losses, L.shape[1],
        RATIO=ratio, WITH_LOSS=loss, K=K, NB=many, num_warps=max(ROW_WARPS, K * many // 4096),
    )  # fmt: skip


def make_full_operand(rows: Tensor) -> Tensor:
    """Return (rows, K) in float32, padded with zero columns so that rows are read with wide loads."""
    return torch.nn.functional.pad(rows.float(), (0, pad_operand_topics(rows.shape[1]) - rows.shape[1])).contiguous()


@dataclass(frozen=True)
class TermItems:
    """The nonzeros sorted by term, in pieces of at most `PIECE`: work for one program each."""

    term: Tensor
    begin: Tensor
    end: Tensor
    document: Tensor
    count: Tensor

    PIECE = 1024


def sort_by_terms(csr: Csr, terms: int) -> TermItems:
    pointer, index, count = csr
    device = index.device
    order = torch.argsort(index, stable=True)
    documents = torch.arange(len(pointer) - 1, device=device, dtype=torch.int32)
    document = torch.repeat_interleave(documents, pointer.diff(), output_size=len(index))[order]
    per_term = torch.bincount(index, minlength=terms)
    first = per_term.cumsum(0) - per_term
    pieces = -(-per_term // TermItems.PIECE)
    term = torch.repeat_interleave(torch.arange(terms, device=device), pieces)
    number = torch.arange(len(term), device=device) - (pieces.cumsum(0) - pieces)[term]
    begin = first[term] + number * TermItems.PIECE
    end = torch.minimum(begin + TermItems.PIECE, (first + per_term)[term])
    return TermItems(term.to(torch.int32), begin, end, document, take_elements(count, order))


def multiply_sparse_t(items: TermItems, C: Tensor, terms: int) -> Tensor:
    results = []
    for columns in C.split(PRODUCT_K, dim=1):
        out = torch.zeros(terms, pad_operand_topics(columns.shape[1]), device=C.device)
        add_sparse_statistic(items, columns.contiguous(), out, out, ratio=False)
        results.append(out[:, : columns.shape[1]])
    return torch.cat(results, dim=1)


def add_sparse_statistic(items: TermItems, L: Tensor, table: Tensor, S: Tensor, *, ratio: bool = True) -> None:
    """S (terms, K) += sum_i x / p' l_i; without `ratio`, sum_i x l_i."""
    if len(items.term) == 0:
        return
    K = table.shape[1]
    many = max(16, min(TERM_NONZEROS, 8192 // K))
    kernels.accumulate_sparse_terms[(len(items.term),)](
        items.term, items.begin, items.end, items.document, items.count, L, table, S, L.shape[1],
        RATIO=ratio, K=K, NB=many, num_warps=max(TERM_WARPS, K * many // 4096),
    )  # fmt: skip


def solve_columns(target: Tensor, gram: Tensor, free: Tensor, sweeps: int) -> None:
    """Minimise w gram w / 2 - c w over w >= 0 for each column of `free` (k, size), some sweeps, in place."""
    k, size = free.shape
    K = pad_operand_topics(k)
    columns = max(16, 2048 // K)
    kernels.sweep_least_squares[(triton.cdiv(size, columns),)](
        target.contiguous(), gram.contiguous(), free, size, k, sweeps, K=K, BN=columns,
        num_warps=max(2, columns * K // 1024),
    )  # fmt: skip


class DensePass:
    """Dense counts, padded and on the device.

    The loss is that of the rounded, normalised rows; near an optimum it is off by the square of the rounding.
    """

    def __init__(
        self, counts: Tensor, per_document: Tensor, share: Tensor, per_term: Tensor | None = None, tile: Any = None
    ) -> None:
        self.counts, self.share, self.per_term, self.tile = counts, share, per_term, tile
        self.per_document, self.rows, self.tokens = per_document, len(per_document), per_document.double().sum()

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, loss: bool = True) -> Tensor:
        k, (_, width) = L.shape[1], self.counts.shape
        table = (Ft / self.share[:, None]).clamp(FLOOR, LARGEST)
        v = make_operand(table, width, self.counts, empty=1.0)
        tile = self.tile or choose_tile(self.counts, k, loss)
        total, parts = zero_loss(L.device), (part.split(MANY) for part in (self.counts, L, self.per_document))
        seen = (self.share > LEAST_SHARE).float()
        mass, rounded = seen @ Ft, (seen * self.share) @ v[: len(Ft)].float()  # of the topics, exact and rounded
        for X, some, lengths in zip(*parts, strict=True):
            u = make_operand(some * SCALE, len(X), X, empty=SCALE)
            own, other, logs = compute_dense_statistics(X, u, v, loss=loss, tile=tile)
            S.add_(other[: len(S), :k] / self.share[:, None])
            if loss:
                size = (u[: len(some)].float() @ rounded) / (some @ mass * SCALE)
                total += logs.sum(dtype=torch.float64) - lengths.double() @ size.log2().double()
            keep_or_normalise(some, some * own[: len(some), :k])
        if not loss:
            return total
        return -(math.log(2) * (total - math.log2(SCALE) * self.tokens) + self.of_shares)

    @functools.cached_property
    def of_shares(self) -> Tensor:
        """sum x log q, which the kernels leave out of the loss."""
        per_term = sum_dense_counts(self.counts)[1] if self.per_term is None else self.per_term
        return per_term[: len(self.share)] @ self.share.double().log()

    def multiply(self, B: Tensor) -> Tensor:
        return multiply_dense(self.counts, B, transposed=False)[: self.rows]

    def multiply_t(self, C: Tensor) -> Tensor:
        return multiply_dense(self.counts, C, transposed=True)[: len(self.share)]


class SparsePass:
    """Rows of nonzeros on the device, and the same nonzeros sorted by term, from which S is summed.

    Atomics in the pass over the rows would take many times as long, and lose the last of many documents.
    """

    def __init__(self, csr: Any, share: Tensor, per_term: Tensor | None = None) -> None:
        self.csr, self.share, self.per_term = csr, share, per_term

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, loss: bool = True) -> Tensor:
        table = make_full_operand(Ft / self.share[:, None])
        sums = torch.zeros_like(table)
        add_sparse_statistic(self.by_terms, L, table, sums)
        logs = update_sparse(self.csr, L, table, loss=loss)
        S.add_(sums[:, : L.shape[1]] / self.share[:, None])
        return -(logs.sum(dtype=torch.float64) + self.of_shares) if loss else zero_loss(L.device)

    @functools.cached_property
    def by_terms(self) -> TermItems:
        return sort_by_terms(self.csr, len(self.share))

    @functools.cached_property
    def of_shares(self) -> Tensor:
        per_term = sum_sparse_terms(self.csr, len(self.share)) if self.per_term is None else self.per_term
        return per_term @ self.share.double().log()

    def multiply(self, B: Tensor) -> Tensor:
        return multiply_sparse(self.csr, B)

    def multiply_t(self, C: Tensor) -> Tensor:
        return multiply_sparse_t(self.by_terms, C, len(self.share))
