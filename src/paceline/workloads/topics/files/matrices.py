"""Matrices in the files of scipy and Matrix Market. They are read whole, into memory."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.workloads.topics.counts.arrays import from_array, from_scipy
from paceline.workloads.topics.counts.blocks import Counts
from paceline.workloads.topics.files.sidecar import labelled

AGAIN = "write it again or copy it again"


def read_npz(path: Path, fractional: bool = False) -> Counts:
    """A sparse matrix saved by scipy.sparse.save_npz, or a single dense array saved by numpy.savez."""
    import scipy.sparse

    try:
        with np.load(path, allow_pickle=False) as archive:
            if "format" in archive.files:
                matrix: Any = scipy.sparse.load_npz(path)
                if hasattr(matrix, "check_format"):
                    matrix.check_format(full_check=True)
            elif len(archive.files) == 1:
                matrix = archive[archive.files[0]]
            else:
                there = ", ".join(archive.files) or "nothing"
                raise UserError(
                    f"{path}: neither a sparse matrix of scipy.sparse.save_npz nor a single array (there: {there})"
                )
    except UserError:
        raise
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "the zip archive is damaged or cut short"
        raise UserError(f"{path}: cannot be read: {reason}; {AGAIN}") from None
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise UserError(f"{path}: not a matrix that can be read ({first_line(error)}); {AGAIN}") from None
    return _counts(matrix, path, fractional)


def read_mtx(path: Path, fractional: bool = False) -> Counts:
    """A Matrix Market file, gzip or not: documents are rows."""
    from scipy.io import mmread

    try:
        matrix = mmread(path, spmatrix=False)
    except (OSError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; {AGAIN}") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise UserError(f"{path}: not a Matrix Market file ({first_line(error)}); {AGAIN}") from None
    return _counts(matrix, path, fractional)


def _counts(matrix: Any, path: Path, fractional: bool) -> Counts:
    read: Any = from_array if isinstance(matrix, np.ndarray) else from_scipy
    return labelled(read(matrix, fractional=fractional, source=str(path)), path)


def first_line(error: BaseException) -> str:
    """What an error says, or its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
