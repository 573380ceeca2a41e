"""Make counts of arrays, scipy matrices and tensors; those of a device may stay there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import InvalidData, InvalidValue
from paceline.workloads.topics.counts.matrices import (
    FRACTIONS,
    Counts,
    Csr,
    DenseCounts,
    DocumentBlock,
    Locator,
    SparseCounts,
    check_matrix,
    convert_to_smallest,
    find_integer_type,
    make_row_locator,
)

if TYPE_CHECKING:
    import torch

Tensor = Any  # a plan reads counts without torch
PIECE = 1 << 26  # elements of a tensor that are worked on at a time, in a wider type
KINDS = ".npy, .npz, .mtx, .parquet, .csv, .tsv, .jsonl, .txt, a folder of shards or a folder of .txt files"
NO_MATRIX = f"a {{}} is not a matrix of counts; give an array, a torch tensor, a scipy sparse matrix or a path: {KINDS}"
THE_TENSOR = "the tensor"


def from_array(array: Any, *, fractional: bool = False, source: str = "the matrix") -> DenseCounts:
    """Return dense counts; the array is not copied if it is C-contiguous and of the smallest type."""
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(array)
        except (TypeError, ValueError):
            raise InvalidValue(f"{source}: {NO_MATRIX.format(type(array).__name__)}") from None
    check_matrix(array.shape, source, array.dtype)
    place = make_row_locator(source, array.shape[1])
    return DenseCounts(convert_to_smallest(array, fractional=fractional, place=place), fractional=fractional)


def from_scipy(matrix: Any, *, fractional: bool = False, source: str = "the matrix") -> SparseCounts:
    """Return counts of a scipy sparse matrix: duplicates added up, zeros left out, terms ascending."""
    check_matrix(matrix.shape, source, matrix.dtype)
    if matrix.dtype.kind in "bui" and not getattr(matrix, "has_canonical_format", True):
        matrix = matrix.astype(np.int64, copy=False)  # the sum of duplicates must not overflow
    rows = matrix.tocsr()
    if not rows.has_canonical_format or not rows.data.all():
        rows = rows.copy() if rows is matrix else rows
        rows.sum_duplicates()
        rows.eliminate_zeros()
    indptr = np.ascontiguousarray(rows.indptr, np.int64)
    indices = np.ascontiguousarray(rows.indices, np.int32)

    def place(at: int) -> str:
        return f"{source}: document {np.searchsorted(indptr, at, 'right') - 1}, term {indices[at]} (both from 0)"

    data = convert_to_smallest(rows.data, fractional=fractional, place=place)
    return SparseCounts(Csr(indptr, indices, data), matrix.shape[1], fractional=fractional)


def from_torch(tensor: Any, *, fractional: bool = False, on_device: bool = False) -> Counts:
    """Return counts of a tensor; with `on_device` a CUDA tensor stays there, else it is copied to the host."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidValue(f"the matrix: {NO_MATRIX.format(type(tensor).__name__)}")
    if tensor.is_meta:
        raise InvalidValue("a tensor on the device meta has no values; give one that has")
    tensor = tensor.detach()
    if on_device and tensor.is_cuda and tensor.layout in (torch.strided, torch.sparse_csr):
        return from_tensor(tensor, fractional=fractional)
    tensor = tensor.cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    if tensor.layout == torch.strided:
        return from_array(tensor.numpy(), fractional=fractional, source=THE_TENSOR)
    import scipy.sparse

    check_matrix(tensor.shape, THE_TENSOR)
    entries = tensor.to_sparse_coo()
    rows_and_terms = tuple(entries._indices().numpy())
    matrix = scipy.sparse.coo_array((entries._values().numpy(), rows_and_terms), shape=tuple(tensor.shape))
    return from_scipy(matrix, fractional=fractional, source=THE_TENSOR)


@dataclass(frozen=True, eq=False)
class DeviceCounts(Counts):
    """Counts that stay on a device: rows, or row pointers (int64), terms (int32) and counts."""

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
    def device(self) -> "torch.device":
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

    def part(self, start: int, stop: int) -> "DeviceCounts":
        if not self.sparse:
            return replace(self, values=self.values[start:stop])
        pointer, index, count = self.values
        first, last = pointer[[start, stop]].tolist()
        return replace(self, values=(pointer[start : stop + 1] - first, index[first:last], count[first:last]))

    def block(self, start: int, stop: int) -> DocumentBlock:
        parts = [part.cpu().numpy() for part in self.part(start, stop).tensors]
        return DocumentBlock(start, Csr(*parts) if self.sparse else parts[0])

    def take_ranges(self, ranges: Sequence[tuple[int, int]]) -> "DeviceCounts":
        import torch

        pointer, index, count = self.values
        rows = torch.cat([torch.arange(*some, device=self.device) for some in ranges])
        lengths = pointer.diff()[rows]
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        moved = torch.repeat_interleave(pointer[rows] - ends[:-1], lengths)
        at = moved + torch.arange(len(moved), device=self.device)
        return replace(self, values=(ends, index[at], take_elements(count, at)))


def from_tensor(tensor: Tensor, *, fractional: bool = False) -> DeviceCounts:
    """Return counts of a dense or CSR tensor, left on its device; not copied if its type is the smallest."""
    import torch

    check_matrix(tensor.shape, THE_TENSOR)
    terms = int(tensor.shape[1])
    if tensor.layout == torch.strided:
        rows = convert_on_device(tensor.contiguous(), fractional, make_row_locator(THE_TENSOR, terms))
        return DeviceCounts(rows, terms, fractional=fractional)
    pointer, index = tensor.crow_indices().long(), tensor.col_indices()
    lengths = pointer.diff()
    inside = (lengths >= 0).all(), (index >= 0).all(), (index < terms).all()
    if not bool(torch.stack([pointer[0] == 0, pointer[-1] == len(index), *inside]).all()):
        raise InvalidData(f"{THE_TENSOR}: its row pointers or columns do not fit {terms:,} terms; build it again")

    def locate_value(at: int) -> str:
        row = int(torch.searchsorted(pointer, at, right=True)) - 1
        return f"{THE_TENSOR}: document {row}, term {int(index[at])} (both from 0)"

    count = convert_on_device(tensor.values().contiguous(), fractional, locate_value)
    return DeviceCounts((pointer, index.to(torch.int32), count), terms, fractional=fractional)


def convert_on_device(values: Tensor, fractional: bool, place: Locator) -> Tensor:
    """Return the values in their smallest exact type; raise the error of the host for what is not a count."""
    import torch

    if values.dtype == torch.bool:
        return values.view(torch.uint8)
    if values.dtype == torch.uint8 or not values.numel():
        return values.to(torch.uint8)
    if values.is_complex():
        raise InvalidData(f"{THE_TENSOR}: holds complex numbers; counts are whole numbers")
    pieces = values.view(-1).split(PIECE)
    least, largest, whole = torch.stack([_find_range(piece) for piece in pieces]).T
    low, high = float(least.amin()), float(largest.amax())
    kind = find_integer_type(high) if bool(whole.all()) and low >= 0 else None
    if kind is None:
        if not (fractional and low >= 0 and high <= float(np.finfo(np.float32).max)):
            half = values.is_floating_point() and values.dtype.itemsize == 2  # numpy has no bfloat16
            host = (values.float() if half else values).cpu().numpy()
            convert_to_smallest(host, fractional=fractional, place=place)
            raise AssertionError("the device rejects counts that the host accepts")
        kind = FRACTIONS
    dtype = torch.from_numpy(np.empty(0, kind)).dtype
    if dtype == values.dtype:
        return values
    return torch.cat([piece.to(dtype) for piece in pieces]).view(values.shape)


def _find_range(piece: Tensor) -> Tensor:
    import torch

    piece = piece if piece.is_floating_point() else piece.long()
    return torch.stack([piece.min(), piece.max(), (piece == piece.trunc()).all()]).double()


def take_elements(values: Tensor, at: Tensor) -> Tensor:
    """Return values[at], which torch does not support for uint16."""
    import torch

    return values.view(torch.int16)[at].view(torch.uint16) if values.dtype == torch.uint16 else values[at]
