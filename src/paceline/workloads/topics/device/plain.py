"""What a pass over documents is, and its arithmetic in plain torch: for cores, and for devices without Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from paceline.workloads.topics.counts.on_device import PIECE

Tensor = Any  # torch.Tensor; torch is not typed here


class Products(Protocol):
    """A matrix X, known by its products."""

    def multiply(self, B: Tensor) -> Tensor: ...  # X @ B

    def multiply_t(self, C: Tensor) -> Tensor: ...  # X.T @ C


class DocumentPass(Products, Protocol):
    """One read of some documents. `L` (rows, k) is updated in place; `S` (terms, k) gets sum_i x_ij / p_ij l_i added.

    `rows` is "em" (S from the rows before the update) or "newton" (S from the updated rows; dense counts and many
    topics take EM steps under this name too, with S from the rows before). Returns the sum of -x log p at the incoming
    L and F, a float64 tensor on the device; nothing waits for the device. Without `loss` it is zero, and costs nothing.
    """

    def __call__(self, L: Tensor, Ft: Tensor, S: Tensor, *, rows: str, loss: bool = True) -> Tensor: ...


ReadPasses = Callable[[], Iterable[tuple[int, int, DocumentPass]]]
"""The passes over a rank's documents, each with its range of rows; called once for every pass over all of them."""


class Joined:
    """The products of all documents, from the passes over parts of them."""

    def __init__(self, documents: ReadPasses, terms: int) -> None:
        self.documents, self.terms = documents, terms

    def multiply(self, B: Tensor) -> Tensor:
        return torch.cat([step.multiply(B) for _, _, step in self.documents()])

    def multiply_t(self, C: Tensor) -> Tensor:
        total = torch.zeros(self.terms, C.shape[1], device=C.device)
        for first, last, step in self.documents():
            total += step.multiply_t(C[first:last])
        return total


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
    """Rows of nonzeros in plain torch, EM steps only."""

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
    """Rows of `new`, made to sum to one, into L; a document without counts keeps its row."""
    norm = new.sum(1, keepdim=True)
    L.copy_(torch.where(norm > 0, new / norm.clamp_min(1e-30), L))


def zero_loss(device: Any) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)
