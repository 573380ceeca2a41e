"""A pass over documents on a device: their rows of L are updated, and the statistic for F is added up, in one read.

`make_pass` brings one block of counts to the device. With Triton the counts stay in their small type and L F is never
written to memory; without it the same arithmetic runs in plain torch, slower.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from paceline.workloads.topics.counts.blocks import Csr, DocumentBlock
from paceline.workloads.topics.device.plain import DocumentPass, PlainDense, PlainSparse, keep_or_normalise, zero_loss
from paceline.workloads.topics.device.tensors import (
    dense_sums,
    say_plain,
    sparse_term_sums,
    triton_runs_on,
    upload,
    whole_tiles,
)
from paceline.workloads.topics.sizes import NEWTON_TOPICS

Tensor = Any  # torch.Tensor; torch is not typed here
MANY = 1 << 20  # dense documents whose sums for the terms are added up in one float32
LEAST_SHARE = 1e-30


def make_pass(block: DocumentBlock, per_document: Tensor, q: Tensor, device: Any) -> DocumentPass:
    """The pass over one block, its counts copied to `device`.

    `per_document` are the counts of the block's documents, `q` the shares of the terms in the counts of all documents.
    """
    device = torch.device(device)
    per_document, share = (torch.as_tensor(part).to(device, torch.float32) for part in (per_document, q))
    if isinstance(block.values, Csr):
        csr = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in block.parts)
        return pass_over(tuple(part.to(device, non_blocking=True) for part in csr), per_document, share)
    if not triton_runs_on(device):
        return pass_over(torch.from_numpy(block.values).to(device), per_document, share)
    return DensePass(upload(block.values, device), per_document, share.clamp_min(LEAST_SHARE))


def pass_over(values: Any, per_document: Tensor, share: Tensor, per_term: Tensor | None = None) -> DocumentPass:
    """The pass over counts that are on their device: rows, or the three parts of CSR. All tensors are there.

    `per_term` are the sums of these counts, where they are known.
    """
    device, share = per_document.device, share.clamp_min(LEAST_SHARE)
    kernels = triton_runs_on(device)
    if device.type == "cuda" and not kernels:
        say_plain()
    if isinstance(values, tuple):
        return SparsePass(values, per_document, share, per_term) if kernels else PlainSparse(values, share)
    return DensePass(whole_tiles(values), per_document, share, per_term) if kernels else PlainDense(values)


class DensePass:
    """Dense counts, padded and on the device. Newton steps are not worth their k x k model here: all steps are EM.

    The operands are halves, whose rows no longer sum to what they should. The loss is that of the rounded rows made to
    sum to it again: near an optimum it then differs from the exact one by the square of the rounding.
    """

    def __init__(
        self, counts: Tensor, per_document: Tensor, share: Tensor, per_term: Tensor | None = None, tile: Any = None
    ) -> None:
        self.counts, self.share, self.per_term, self.tile = counts, share, per_term, tile
        self.per_document, self.rows, self.tokens = per_document, len(per_document), per_document.double().sum()

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        from paceline.workloads.topics.device import triton_calls as calls

        k, (_, width) = L.shape[1], self.counts.shape
        table = (Ft / self.share[:, None]).clamp(calls.FLOOR, calls.LARGEST)
        v = calls.operand(table, width, self.counts, empty=1.0)
        tile = self.tile or calls.dense_tile(self.counts, k, loss)
        total, parts = zero_loss(L.device), (part.split(MANY) for part in (self.counts, L, self.per_document))
        seen = (self.share > LEAST_SHARE).float()
        mass, there = seen @ Ft, (seen * self.share) @ v[: len(Ft)].float()  # of the topics, as they are and rounded
        for X, some, lengths in zip(*parts, strict=True):
            u = calls.operand(some * calls.SCALE, len(X), X, empty=calls.SCALE)
            own, other, logs = calls.dense_statistics(X, u, v, loss=loss, tile=tile)
            S.add_(other[: len(S), :k] / self.share[:, None])
            if loss:
                size = (u[: len(some)].float() @ there) / (some @ mass * calls.SCALE)
                total += logs.sum(dtype=torch.float64) - lengths.double() @ size.log2().double()
            keep_or_normalise(some, some * own[: len(some), :k])
        if not loss:
            return total
        return -(math.log(2) * (total - math.log2(calls.SCALE) * self.tokens) + self.of_shares)

    @functools.cached_property
    def of_shares(self) -> Tensor:
        """sum x log q: what the kernels leave out of the loss."""
        per_term = dense_sums(self.counts)[1] if self.per_term is None else self.per_term
        return per_term[: len(self.share)] @ self.share.double().log()

    def multiply(self, B: Tensor) -> Tensor:
        from paceline.workloads.topics.device.triton_calls import dense_product

        return dense_product(self.counts, B, transposed=False)[: self.rows]

    def multiply_t(self, C: Tensor) -> Tensor:
        from paceline.workloads.topics.device.triton_calls import dense_product

        return dense_product(self.counts, C, transposed=True)[: len(self.share)]


class SparsePass:
    """Rows of nonzeros on the device, and the same nonzeros in the order of the terms, from which S is added up: by
    atomics in the pass over the rows it would take many times as long, and lose the last ones of many documents."""

    def __init__(self, csr: Any, per_document: Tensor, share: Tensor, per_term: Tensor | None = None) -> None:
        self.csr, self.per_document, self.share, self.per_term = csr, per_document, share, per_term

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor:
        from paceline.workloads.topics.device import triton_calls as calls

        newton = rows == "newton" and L.shape[1] <= NEWTON_TOPICS
        table = calls.full_operand(Ft / self.share[:, None])
        sums = torch.zeros_like(table)
        if not newton:
            calls.sparse_statistic(self.by_terms, L, table, sums)
        logs = calls.sparse_update(self.csr, L, table, self.per_document, newton=newton, loss=loss)
        if newton:
            calls.sparse_statistic(self.by_terms, L, table, sums)
        S.add_(sums[:, : L.shape[1]] / self.share[:, None])
        return -(logs.sum(dtype=torch.float64) + self.of_shares) if loss else zero_loss(L.device)

    @functools.cached_property
    def by_terms(self) -> Any:
        from paceline.workloads.topics.device.triton_calls import by_terms

        return by_terms(self.csr, len(self.share))

    @functools.cached_property
    def of_shares(self) -> Tensor:
        """sum x log q: what the kernels leave out of the loss."""
        per_term = sparse_term_sums(self.csr, len(self.share)) if self.per_term is None else self.per_term
        return per_term @ self.share.double().log()

    def multiply(self, B: Tensor) -> Tensor:
        from paceline.workloads.topics.device.triton_calls import sparse_product

        return sparse_product(self.csr, B)

    def multiply_t(self, C: Tensor) -> Tensor:
        from paceline.workloads.topics.device.triton_calls import sparse_spread

        return sparse_spread(self.by_terms, C, len(self.share))
