"""Counts that live on a device: checked, narrowed and added up there. A fit of them never brings them to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline.errors import UserError
from paceline.workloads.topics.blocks import Block, Counts, Csr
from paceline.workloads.topics.device import (
    PIECE,
    Pass,
    dense_sums,
    pass_over,
    sparse_sums,
    taken,
    whole_tiles_bytes,
)
from paceline.workloads.topics.narrow import (
    FRACTIONS,
    Place,
    check_dtype,
    check_shape,
    narrowed,
    place_in_rows,
    whole_type,
)
from paceline.workloads.topics.sizes import SORT_BYTES
from paceline.workloads.topics.tiers import free_device_bytes

Tensor = Any  # torch.Tensor; torch is not typed here
TINIEST = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, eq=False)
class DeviceCounts:
    """Rows (documents, terms), or nonzeros: row pointers (int64), terms (int32) and counts."""

    values: Any
    terms: int
    vocabulary: Sequence[str] | None = None
    names: Sequence[str] | None = None
    fractional: bool = False

    resident = True

    @property
    def sparse(self) -> bool:
        return isinstance(self.values, tuple)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.values if self.sparse else (self.values,)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def documents(self) -> int:
        return len(self.tensors[0]) - self.sparse

    @property
    def stored_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.tensors)

    @property
    def row_bytes(self) -> int:
        return self.stored_bytes // self.documents

    def weights(self) -> np.ndarray:
        if not self.sparse:
            return np.full(self.documents, self.terms, np.int64)
        return self.values[0].diff().cpu().numpy()

    def part(self, start: int, stop: int) -> DeviceCounts:
        if not self.sparse:
            return replace(self, values=self.values[start:stop])
        pointer, index, count = self.values
        first, last = pointer[[start, stop]].tolist()
        return replace(self, values=(pointer[start : stop + 1] - first, index[first:last], count[first:last]))

    def block(self, start: int, stop: int) -> Block:
        """A copy on the host."""
        parts = [part.cpu().numpy() for part in self.part(start, stop).tensors]
        return Block(start, Csr(*parts) if self.sparse else parts[0])

    def sums(self) -> tuple[Tensor, Tensor]:
        """Per document and per term, float64, on the device."""
        return sparse_sums(self.values, self.terms) if self.sparse else dense_sums(self.values)

    def some(self, runs: Sequence[tuple[int, int]]) -> DeviceCounts:
        """The documents of some ranges, sparse ones."""
        pointer, index, count = self.values
        rows = torch.cat([torch.arange(*run, device=self.device) for run in runs])
        lengths = pointer.diff()[rows]
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        moved = torch.repeat_interleave(pointer[rows] - ends[:-1], lengths)
        at = moved + torch.arange(len(moved), device=self.device)
        return replace(self, values=(ends, index[at], taken(count, at)))

    def passes(self, per_document: Tensor, per_term: Tensor, share: Tensor) -> Callable[[], Any]:
        """The passes over all documents, in one where what it needs fits beside them, else some at a time.

        That is a copy of dense counts in whole tiles, and the sort of sparse ones into the order of the terms.
        `per_term` are the sums of these documents, `share` the shares of the terms in all of them, on all ranks.
        """
        needed = SORT_BYTES * self.stored_bytes if self.sparse else whole_tiles_bytes(self.values)
        if needed <= free_device_bytes(self.device):
            whole = [(0, self.documents, pass_over(self.values, per_document, share, per_term))]
            return lambda: whole if self.documents else []
        rows = max(1, min(self.documents, free_device_bytes(self.device) * self.documents // needed) // 2)
        return lambda: self._in_turn(rows, per_document, share)

    def minus_x_log_p(self, L: np.ndarray, F: np.ndarray) -> float:
        """The sum of -x log p, in float64."""
        rows, topics = (torch.as_tensor(part, dtype=torch.float64, device=self.device) for part in (L, F))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if not self.sparse:
            step = max(1, PIECE // 4 // self.terms)
            for x, some in zip(self.values.split(step), rows.split(step), strict=True):
                total -= (x.double() * (some @ topics).clamp_min_(TINIEST).log_()).sum()
            return float(total)
        pointer, index, count = self.values
        documents = torch.repeat_interleave(torch.arange(self.documents, device=self.device), pointer.diff())
        topics, step = topics.T.contiguous(), PIECE // 4 // len(topics)
        for i, j, x in zip(documents.split(step), index.split(step), count.split(step), strict=True):
            total -= x.double() @ (rows[i] * topics[j]).sum(1).clamp_min_(TINIEST).log_()
        return float(total)

    def _in_turn(self, rows: int, per_document: Tensor, share: Tensor) -> Any:
        for first in range(0, self.documents, rows):
            last = min(self.documents, first + rows)
            step: Pass = pass_over(self.part(first, last).values, per_document[first:last], share)
            yield first, last, step


def from_tensor(tensor: Tensor, *, fractional: bool = False) -> DeviceCounts:
    """Counts of a dense tensor or of a sparse CSR one, left where it is; not copied if its type is the smallest."""
    source = "the tensor"
    check_shape(tensor.shape, source)
    terms = int(tensor.shape[1])
    if tensor.layout == torch.strided:
        counts = narrowed_there(tensor.contiguous(), fractional, place_in_rows(source, terms))
        return DeviceCounts(counts, terms, fractional=fractional)
    pointer, index = tensor.crow_indices().long(), tensor.col_indices()
    if terms > np.iinfo(np.int32).max:
        raise UserError(f"{source}: {terms:,} terms; at most 2,147,483,647 are possible")
    lengths = pointer.diff()
    ends = [pointer[0] == 0, pointer[-1] == len(index), (lengths >= 0).all(), (index >= 0).all(), (index < terms).all()]
    if not bool(torch.stack(ends).all()):
        raise UserError(f"{source}: its row pointers or its columns are not those of {terms:,} terms; build it again")

    def place(at: int) -> str:
        row = int(torch.searchsorted(pointer, at, right=True)) - 1
        return f"{source}: document {row}, term {int(index[at])} (both from 0)"

    count = narrowed_there(tensor.values().contiguous(), fractional, place)
    return DeviceCounts((pointer, index.to(torch.int32), count), terms, fractional=fractional)


def uploaded(counts: Counts, device: torch.device) -> DeviceCounts:
    """All of some counts, on a device."""
    block = counts.block(0, counts.documents)
    parts = tuple(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in block.parts)
    return DeviceCounts(parts if isinstance(block.values, Csr) else parts[0], counts.terms)


def narrowed_there(values: Tensor, fractional: bool, place: Place) -> Tensor:
    """In the smallest type that holds them exactly; what is not a count is refused, as on the host."""
    if values.dtype == torch.bool:
        return values.view(torch.uint8)
    if values.dtype == torch.uint8 or not values.numel():
        return values.to(torch.uint8)
    check_dtype(np.dtype(np.float32) if values.is_floating_point() else _numpy_type(values), "the tensor")
    pieces = values.view(-1).split(PIECE)
    facts = torch.stack([_facts(piece) for piece in pieces])
    low, high = float(facts[:, 0].amin()), float(facts[:, 1].amax())
    whole = bool(facts[:, 2].all())
    kind = whole_type(high) if whole and low >= 0 else None
    if kind is None:
        if not (fractional and low >= 0 and high <= float(np.finfo(np.float32).max)):
            _refuse(pieces, fractional, place)
        kind = FRACTIONS
    dtype = torch.from_numpy(np.empty(0, kind)).dtype
    if dtype == values.dtype:
        return values
    return torch.cat([piece.to(dtype) for piece in pieces]).view(values.shape)


def _facts(piece: Tensor) -> Tensor:
    """Least, largest, whether all are whole numbers; NaN makes each of them fail."""
    if not piece.is_floating_point():
        piece = piece.long()
        return torch.stack([piece.min(), piece.max(), piece.new_ones(())]).double()
    return torch.stack([piece.min(), piece.max(), (piece == piece.trunc()).all()]).double()


def _refuse(pieces: Sequence[Tensor], fractional: bool, place: Place) -> None:
    """The message of the host, for the first number that is none."""
    for number, piece in enumerate(pieces):
        piece = piece.float() if piece.dtype in (torch.float16, torch.bfloat16) else piece
        narrowed(piece.cpu().numpy(), fractional=fractional, place=lambda at, first=number * PIECE: place(first + at))  # type: ignore[misc]
    raise AssertionError("counts that the device refuses, and the host does not")


def _numpy_type(values: Tensor) -> np.dtype:
    return np.dtype(np.complex64) if values.is_complex() else np.dtype(np.int64)
