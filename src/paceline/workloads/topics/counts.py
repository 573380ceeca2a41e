"""Counts from whatever holds them: arrays, tensors, sparse matrices, files, folders."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from paceline.data.files import nearest
from paceline.errors import UserError
from paceline.workloads.topics.blocks import Block, Counts, Csr, DenseCounts, SparseCounts, allowing_fractions, named
from paceline.workloads.topics.memory import in_memory, sparsified
from paceline.workloads.topics.narrow import check_dtype, check_shape, narrowed, place_in_rows
from paceline.workloads.topics.totals import Totals, totals

if TYPE_CHECKING:
    from paceline.workloads.topics.text import TextOptions

__all__ = [
    "Block",
    "Counts",
    "Csr",
    "DenseCounts",
    "SparseCounts",
    "Totals",
    "in_memory",
    "named",
    "read_counts",
    "sparsified",
    "totals",
]

KINDS = ".npy, .npz, .mtx, .parquet, .csv, .tsv, .jsonl, .txt, a folder of shards or a folder of .txt files"
WHAT_IS_READ = f"give an array, a torch tensor, a scipy sparse matrix or a path: {KINDS}"


def read_counts(
    source: Any, *, fractional: bool = False, text: TextOptions | None = None, on_device: bool = False
) -> Counts:
    """Counts from a path, an ndarray, a torch tensor, a scipy sparse matrix or a dataset on disk.

    What is in memory is brought to its smallest exact type at once, and so are the contents of .npz and .mtx files. A
    .npy file, a folder of shards and a Parquet file of counts stay on disk. `text` says how texts are counted.
    `on_device`: a tensor of a device, dense or sparse CSR, is left there; else it is brought to memory.
    """
    if isinstance(source, str | Path):
        return _read_path(Path(source).expanduser(), fractional, text)
    if callable(getattr(source, "as_counts", None)):  # the datasets of datasets.py
        return source.as_counts(fractional=fractional)
    if _is_counts(source):
        return allowing_fractions(source) if fractional else source
    if type(source).__module__.partition(".")[0] == "torch":
        return _from_torch(source, fractional, on_device)
    if type(source).__module__.startswith("scipy.sparse"):
        return from_scipy(source, fractional=fractional)
    if isinstance(source, np.memmap):
        return _from_memmap(source, fractional)
    return from_array(source, fractional=fractional)


def from_array(array: Any, *, fractional: bool = False, source: str = "the matrix") -> DenseCounts:
    """Dense counts in memory. The array is not copied if it is C-contiguous and of the smallest type."""
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(array)
        except (TypeError, ValueError):
            raise UserError(f"{source}: a {type(array).__name__} is not a matrix of counts; {WHAT_IS_READ}") from None
    check_dtype(array.dtype, source)
    check_shape(array.shape, source)
    place = place_in_rows(source, array.shape[1])
    return DenseCounts(narrowed(array, fractional=fractional, place=place), fractional=fractional)


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
    if terms > np.iinfo(np.int32).max:
        raise UserError(f"{source}: {terms:,} terms; at most 2,147,483,647 are possible")
    indptr = np.ascontiguousarray(rows.indptr, np.int64)
    indices = np.ascontiguousarray(rows.indices, np.int32)

    def place(at: int) -> str:
        return f"{source}: document {np.searchsorted(indptr, at, 'right') - 1}, term {indices[at]} (both from 0)"

    data = narrowed(rows.data, fractional=fractional, place=place)
    return SparseCounts(Csr(indptr, indices, data), terms, fractional=fractional)


def _is_counts(source: Any) -> TypeGuard[Counts]:
    return all(hasattr(source, name) for name in ("documents", "terms", "block", "weights", "resident"))


def _from_torch(tensor: Any, fractional: bool, on_device: bool) -> Counts:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"a {type(tensor).__name__} is not a matrix of counts; {WHAT_IS_READ}")
    if tensor.is_meta:
        raise UserError("a tensor of the device meta has a shape and no counts; give one that holds them")
    tensor = tensor.detach()
    if on_device and tensor.is_cuda and tensor.layout in (torch.strided, torch.sparse_csr):
        from paceline.workloads.topics.on_device import from_tensor

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


def _from_memmap(array: np.memmap, fractional: bool) -> Counts:
    """A whole file that numpy has mapped is read as a file; a part of one through the mapping."""
    from paceline.workloads.topics.npy import MappedCounts, NpyCounts

    source = str(array.filename or "the mapped matrix")
    check_dtype(array.dtype, source)
    check_shape(array.shape, source)
    if isinstance(array.base, mmap.mmap) and array.filename and array.flags.c_contiguous and array.mode != "c":
        path = Path(array.filename)
        return NpyCounts(path, array.shape[0], array.shape[1], array.dtype, array.offset, fractional=fractional)
    return MappedCounts(array, source, fractional=fractional)


def _read_path(path: Path, fractional: bool, options: TextOptions | None) -> Counts:
    from paceline.workloads.topics import shards
    from paceline.workloads.topics.documents import is_text
    from paceline.workloads.topics.text import read_text

    try:
        if not path.exists():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"{path}: there is no such file or folder{nearest(path.name, siblings)}")
        if is_text(path):
            return read_text(path, options)
        if (path / shards.MANIFEST).exists():
            return shards.read_shards(path)
        if path.is_dir():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
            raise UserError(f"{path}: a folder without {shards.MANIFEST} and without .txt files (there: {found})")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return _reader(path)(path, fractional)


def _reader(path: Path) -> Callable[[Path, bool], Counts]:
    from paceline.workloads.topics import matrices, npy, parquet

    name = path.name.lower().removesuffix(".gz")
    readers: dict[str, Callable[[Path, bool], Counts]] = {
        ".npy": npy.read_npy,
        ".npz": matrices.read_npz,
        ".mtx": matrices.read_mtx,
        ".parquet": parquet.read_parquet,
    }
    for suffix, read in readers.items():
        if name.endswith(suffix):
            return read
    raise UserError(f"{path}: a file of this kind is not read; give {KINDS}")
