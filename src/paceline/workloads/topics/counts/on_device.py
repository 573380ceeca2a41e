"""Counts that live on a device: checked there, in the smallest exact type. A fit never brings them to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline.errors import UserError
from paceline.workloads.topics.counts import matrices
from paceline.workloads.topics.counts.matrices import Counts, Csr, DocumentBlock, LabelledCounts

Tensor = Any  # torch.Tensor; torch is not typed here
PIECE = 1 << 26  # elements that are worked on at a time, in a wider type


@dataclass(frozen=True, eq=False)
class DeviceCounts(LabelledCounts):
    """Rows (documents, terms), or nonzeros: row pointers (int64), terms (int32) and counts."""

    values: Any
    terms: int

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
        return self.values[0].diff().cpu().numpy() if self.sparse else super().weights()

    def part(self, start: int, stop: int) -> DeviceCounts:
        if not self.sparse:
            return replace(self, values=self.values[start:stop])
        pointer, index, count = self.values
        first, last = pointer[[start, stop]].tolist()
        return replace(self, values=(pointer[start : stop + 1] - first, index[first:last], count[first:last]))

    def block(self, start: int, stop: int) -> DocumentBlock:
        """A copy on the host."""
        parts = [part.cpu().numpy() for part in self.part(start, stop).tensors]
        return DocumentBlock(start, Csr(*parts) if self.sparse else parts[0])

    def some(self, runs: Sequence[tuple[int, int]]) -> DeviceCounts:
        """The documents of some ranges, sparse ones."""
        pointer, index, count = self.values
        rows = torch.cat([torch.arange(*run, device=self.device) for run in runs])
        lengths = pointer.diff()[rows]
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        moved = torch.repeat_interleave(pointer[rows] - ends[:-1], lengths)
        at = moved + torch.arange(len(moved), device=self.device)
        return replace(self, values=(ends, index[at], take_elements(count, at)))


def from_tensor(tensor: Tensor, *, fractional: bool = False) -> DeviceCounts:
    """Counts of a dense tensor or of a sparse CSR one, left where it is; not copied if its type is the smallest."""
    source = "the tensor"
    matrices.check_shape(tensor.shape, source)
    terms = int(tensor.shape[1])
    if tensor.layout == torch.strided:
        rows = convert_on_device(tensor.contiguous(), fractional, matrices.make_row_locator(source, terms))
        return DeviceCounts(rows, terms, fractional=fractional)
    pointer, index = tensor.crow_indices().long(), tensor.col_indices()
    matrices.check_terms(terms, source)
    lengths = pointer.diff()
    ends = [pointer[0] == 0, pointer[-1] == len(index), (lengths >= 0).all(), (index >= 0).all(), (index < terms).all()]
    if not bool(torch.stack(ends).all()):
        raise UserError(f"{source}: its row pointers or its columns are not those of {terms:,} terms; build it again")

    def place(at: int) -> str:
        row = int(torch.searchsorted(pointer, at, right=True)) - 1
        return f"{source}: document {row}, term {int(index[at])} (both from 0)"

    count = convert_on_device(tensor.values().contiguous(), fractional, place)
    return DeviceCounts((pointer, index.to(torch.int32), count), terms, fractional=fractional)


def upload_counts(counts: Counts, device: torch.device) -> DeviceCounts:
    """All of some counts, on a device."""
    block = counts.block(0, counts.documents)
    parts = tuple(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in block.parts)
    return DeviceCounts(parts if isinstance(block.values, Csr) else parts[0], counts.terms)


def convert_on_device(values: Tensor, fractional: bool, place: matrices.Locator) -> Tensor:
    """In the smallest type that holds them exactly; what is not a count is refused, as on the host."""
    if values.dtype == torch.bool:
        return values.view(torch.uint8)
    if values.dtype == torch.uint8 or not values.numel():
        return values.to(torch.uint8)
    matrices.check_dtype(np.dtype(np.complex64 if values.is_complex() else np.float32), "the tensor")
    pieces = values.view(-1).split(PIECE)
    least, largest, whole = torch.stack([_facts(piece) for piece in pieces]).T
    low, high = float(least.amin()), float(largest.amax())
    kind = matrices.find_integer_type(high) if bool(whole.all()) and low >= 0 else None
    if kind is None:
        if not (fractional and low >= 0 and high <= float(np.finfo(np.float32).max)):
            _refuse(pieces, fractional, place)
        kind = matrices.FRACTIONS
    dtype = torch.from_numpy(np.empty(0, kind)).dtype
    if dtype == values.dtype:
        return values
    return torch.cat([piece.to(dtype) for piece in pieces]).view(values.shape)


def _facts(piece: Tensor) -> Tensor:
    """Least, largest, whether all are whole numbers; NaN makes each of them fail."""
    piece = piece if piece.is_floating_point() else piece.long()
    return torch.stack([piece.min(), piece.max(), (piece == piece.trunc()).all()]).double()


def _refuse(pieces: Sequence[Tensor], fractional: bool, place: matrices.Locator) -> None:
    """The message of the host, for the first number that is none."""
    for number, piece in enumerate(pieces):
        host = (piece.float() if piece.dtype in (torch.float16, torch.bfloat16) else piece).cpu().numpy()

        def whole_place(at: int, first: int = number * PIECE) -> str:
            return place(first + at)

        matrices.convert_to_smallest(host, fractional=fractional, place=whole_place)
    raise AssertionError("counts that the device refuses, and the host does not")


def take_elements(values: Tensor, at: Tensor) -> Tensor:
    """values[at]; torch has no such thing for uint16."""
    return values.view(torch.int16)[at].view(torch.uint16) if values.dtype == torch.uint16 else values[at]
