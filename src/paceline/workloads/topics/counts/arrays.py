"""Counts from what is in memory: arrays, tensors, sparse matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.counts.matrices import (
    Counts,
    Csr,
    DenseCounts,
    SparseCounts,
    check_dtype,
    check_shape,
    check_terms,
    convert_to_smallest,
    make_row_locator,
)

KINDS = ".npy, .npz, .mtx, .parquet, .csv, .tsv, .jsonl, .txt, a folder of shards or a folder of .txt files"
WHAT_IS_READ = f"give an array, a torch tensor, a scipy sparse matrix or a path: {KINDS}"


def from_array(array: Any, *, fractional: bool = False, source: str = "the matrix") -> DenseCounts:
    """Dense counts in memory. The array is not copied if it is C-contiguous and of the smallest type."""
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(array)
        except (TypeError, ValueError):
            raise UserError(f"{source}: a {type(array).__name__} is not a matrix of counts; {WHAT_IS_READ}") from None
    check_dtype(array.dtype, source)
    check_shape(array.shape, source)
    place = make_row_locator(source, array.shape[1])
    return DenseCounts(convert_to_smallest(array, fractional=fractional, place=place), fractional=fractional)


def from_scipy(matrix: Any, *, fractional: bool = False, source: str = "the matrix") -> SparseCounts:
    """Counts of a scipy sparse matrix of any kind: duplicates added up, zeros left out, terms ascending."""
    check_dtype(matrix.dtype, source)
    check_shape(matrix.shape, source)
    if matrix.dtype.kind in "bui" and matrix.dtype.itemsize < 8 and not getattr(matrix, "has_canonical_format", True):
        matrix = matrix.astype(np.int64)  # entries that are given twice are added up, and must not overflow
    rows = matrix.tocsr()
    if not rows.has_canonical_format:
        rows = rows.copy() if rows is matrix else rows
        rows.sum_duplicates()
    if not rows.data.all():
        rows = rows.copy() if rows is matrix else rows
        rows.eliminate_zeros()
    terms = matrix.shape[1]
    check_terms(terms, source)
    indptr = np.ascontiguousarray(rows.indptr, np.int64)
    indices = np.ascontiguousarray(rows.indices, np.int32)

    def place(at: int) -> str:
        return f"{source}: document {np.searchsorted(indptr, at, 'right') - 1}, term {indices[at]} (both from 0)"

    data = convert_to_smallest(rows.data, fractional=fractional, place=place)
    return SparseCounts(Csr(indptr, indices, data), terms, fractional=fractional)


def from_torch(tensor: Any, *, fractional: bool = False, on_device: bool = False) -> Counts:
    """Counts of a tensor: of a device left there or brought to memory."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"a {type(tensor).__name__} is not a matrix of counts; {WHAT_IS_READ}")
    if tensor.is_meta:
        raise UserError("a tensor of the device meta has a shape and no counts; give one that holds them")
    tensor = tensor.detach()
    if on_device and tensor.is_cuda and tensor.layout in (torch.strided, torch.sparse_csr):
        from paceline.workloads.topics.counts.on_device import from_tensor

        return from_tensor(tensor, fractional=fractional)
    tensor = tensor.cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    if tensor.layout == torch.strided:
        return from_array(tensor.numpy(), fractional=fractional, source="the tensor")
    check_shape(tensor.shape, "the tensor")
    return from_scipy(_scipy_of(tensor), fractional=fractional, source="the tensor")


def _scipy_of(tensor: Any) -> Any:
    import scipy.sparse
    import torch

    if tensor.layout == torch.sparse_csr:
        parts = (tensor.values().numpy(), tensor.col_indices().numpy(), tensor.crow_indices().numpy())
        return scipy.sparse.csr_array(parts, shape=tuple(tensor.shape))
    if tensor.layout == torch.sparse_csc:
        parts = (tensor.values().numpy(), tensor.row_indices().numpy(), tensor.ccol_indices().numpy())
        return scipy.sparse.csc_array(parts, shape=tuple(tensor.shape))
    if tensor.layout == torch.sparse_coo:
        rows, columns = tensor._indices().numpy()
        return scipy.sparse.coo_array((tensor._values().numpy(), (rows, columns)), shape=tuple(tensor.shape))
    raise UserError(f"a tensor of layout {tensor.layout}: give it dense, or as sparse CSR, CSC or COO")
