"""Counts as a plan looks at them: how many there are, from the heads of their files or the beginning of their texts."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from paceline.data.files import FileWalk, TooManyFiles, read_beginning
from paceline.data.npz import read_npz_heads
from paceline.data.tables import open_parquet
from paceline.errors import UserError
from paceline.io.safe_open import check_regular
from paceline.workloads.topics.counts.matrices import check_dtype, check_shape, find_integer_type, join_rows
from paceline.workloads.topics.files import disk_counts, shards
from paceline.workloads.topics.files.disk_counts import COUNTS, INDICES, flatten_lists
from paceline.workloads.topics.files.texts import TermCounter, TextOptions, is_text_file, iterate_documents, suffix_of

SMALL_BYTES = 1 << 22
"""Of files that are read as a whole, and of what is read of others."""
SMALL_NUMBERS = 1 << 23
"""Of packed arrays, in bytes, the same."""
WIDE_BYTES = 1 << 26
"""Of one row."""
FEW_DOCUMENTS = 2000
MOST_NAMES = 100_000
"""In a folder of texts."""
GROWTH = 0.5
"""Of a vocabulary with its texts: with four times as many documents come twice as many terms, about."""


@dataclass(frozen=True)
class CountsProbe:
    """The size of counts, and how it is known where that is not for sure."""

    documents: int
    terms: int
    nonzeros: float
    sparse: bool
    element_bytes: int
    stored_bytes: float
    resident: bool
    assumed: str = ""


def probe_counts(path: Path, options: TextOptions) -> CountsProbe | None:
    """What is known of counts that are not read as a whole; None of those that are small, or none."""
    name = path.name.lower()
    try:
        if path.is_dir():
            return _of_shards(path) if (path / shards.MANIFEST).exists() else _of_folder(path, options)
        if not path.is_file():
            return None
        check_regular(path)
        if name.endswith(".npy"):
            return _of_npy(path)
        if name.endswith(".npz"):
            return _of_npz(path)
        if name.endswith(".parquet"):
            return _of_parquet(path, options)
        if path.stat().st_size <= SMALL_BYTES // (16 if name.endswith(".gz") else 1):
            return None
        if name.endswith((".mtx", ".mtx.gz")):
            return _of_mtx(path)
        return _of_texts(path, options) if is_text_file(path) else None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _dense(shape: tuple[int, ...], element: int, resident: bool, assumed: str = "") -> CountsProbe:
    numbers = float(shape[0]) * shape[1]
    return CountsProbe(shape[0], shape[1], numbers, False, element, numbers * element, resident, assumed)


def _sparse(shape: tuple[int, ...], nonzeros: float, element: int, resident: bool, assumed: str) -> CountsProbe:
    stored = nonzeros * (4.0 + element) + 8.0 * shape[0]
    return CountsProbe(shape[0], shape[1], nonzeros, True, element, stored, resident, assumed)


def _element(some: np.ndarray) -> int:
    """Bytes of a count, where all are like these."""
    whole = some.dtype.kind in "bui" or bool((some == np.floor(some)).all())
    kind = find_integer_type(float(some.max(initial=0))) if whole else None
    return kind.itemsize if kind is not None else 4


def _of_shards(path: Path) -> CountsProbe:
    found = shards.read_shards(path, named=False)
    nonzeros = float(sum(shard.nonzeros for shard in found.shards)) if found.sparse else found.documents * found.terms
    kind = None if found.fractional else find_integer_type(max(shard.largest for shard in found.shards))
    sizes = (nonzeros, found.sparse, kind.itemsize if kind is not None else 4, float(found.stored_bytes))
    return CountsProbe(found.documents, found.terms, *sizes, resident=False)


def _of_npy(path: Path) -> CountsProbe | None:
    shape, _, dtype, _ = disk_counts.read_npy_header(path)
    wide = len(shape) == 2 and shape[1] * dtype.itemsize > WIDE_BYTES
    return _dense(shape, dtype.itemsize, resident=False) if wide else None


def _of_npz(path: Path) -> CountsProbe | None:
    heads = read_npz_heads(path, SMALL_BYTES)
    if sum(head.unpacked_bytes for head in heads.values()) <= SMALL_NUMBERS:
        return None
    if "format" in heads and {"data", "shape"} <= heads.keys():
        sides = heads["shape"].first
        if sides.dtype.kind not in "iu" or (sides < 0).any():
            return None  # refused where it is read
        shape = tuple(sides.ravel().tolist())
        check_shape(shape, str(path))
        check_dtype(heads["data"].dtype, str(path))
        element = _element(heads["data"].first)
        return _sparse(shape, math.prod(heads["data"].shape), element, True, _like_the_first("counts", element))
    if len(heads) != 1:
        return None
    (head,) = heads.values()
    check_shape(head.shape, str(path))
    check_dtype(head.dtype, str(path))
    element = _element(head.first)
    return _dense(head.shape, element, True, _like_the_first("counts", element))


def _like_the_first(what: str, element: int) -> str:
    return f"{what} of {8 * element} bits, as the first are; the others were not read"


def _of_mtx(path: Path) -> CountsProbe | None:
    """From the line that tells its size; None where there is none, which is refused where it is read."""
    lines = read_beginning(path, SMALL_BYTES)[0].split(b"\n")
    kind = lines[0].lower().split()
    sizes = next((line.split() for line in lines[1:] if line.strip() and not line.startswith(b"%")), [])
    if kind[:2] != [b"%%matrixmarket", b"matrix"] or len(sizes) < 2 or not all(size.isdigit() for size in sizes):
        return None
    shape = (int(sizes[0]), int(sizes[1]))
    check_shape(shape, str(path))
    if len(sizes) == 2:
        return _dense(shape, 1, True, "counts of 8 bits; they were not read")
    twice = 2 if b"symmetric" in kind else 1
    return _sparse(shape, twice * int(sizes[2]), 1, True, "counts of 8 bits; they were not read")


def _of_parquet(path: Path, options: TextOptions) -> CountsProbe | None:
    with open_parquet(path, streamed=True) as file:
        about, groups = file.metadata, range(file.metadata.num_row_groups)
        if sum(about.row_group(number).total_byte_size for number in groups) <= SMALL_NUMBERS:
            return None
        if not {INDICES, COUNTS} <= set(file.schema_arrow.names):
            return _estimated(iterate_documents(path, options.column, None), options, about.num_rows, str(path))
        some = next(file.iter_batches(FEW_DOCUMENTS, columns=[INDICES, COUNTS], use_threads=False))
        lengths, indices = flatten_lists(some.column(INDICES))
        said = (file.schema_arrow.metadata or {}).get(b"terms")
        terms = int(said) if said and said.isdigit() else int(indices.max(initial=0)) + 1
        counts = flatten_lists(some.column(COUNTS))[1]
        check_dtype(counts.dtype, str(path))
        element = _element(counts)
    nonzeros = about.num_rows * float(lengths.mean())
    assumed = f"documents like the first {len(lengths):,}, which were read"
    return _sparse((about.num_rows, terms), nonzeros, element, False, assumed)


def _of_texts(path: Path, options: TextOptions) -> CountsProbe:
    text, more = read_beginning(path, SMALL_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        few = Path(folder) / f"texts{suffix_of(path)}"
        few.write_bytes(text[: text.rfind(b"\n") + 1] or text)
        found = list(_as_far_as_readable(iterate_documents(few, options.column, None), str(few), str(path)))
    return _estimated(found, options, round(len(found) * more), str(path))


def _as_far_as_readable(
    found: Iterator[tuple[str | None, str]], few: str, path: str
) -> Iterator[tuple[str | None, str]]:
    """What is cut off in the middle of a document ends it."""
    first = True
    try:
        for one in found:
            yield one
            first = False
    except UserError as error:
        if first:
            raise UserError(str(error).replace(few, path)) from None


def _of_folder(path: Path, options: TextOptions) -> CountsProbe | None:
    """The first files that are come by stand for all."""
    few: list[Path] = []
    count, total = 0, 0
    try:
        for file in FileWalk(MOST_NAMES).iter_below(path):
            if file.name.lower().endswith((".txt", ".txt.gz")):
                count += 1
                if len(few) < FEW_DOCUMENTS and total <= SMALL_BYTES:
                    few.append(file)
                    total += os.stat(file).st_size
    except TooManyFiles:
        without = "plan without them by  --samples DOCUMENTS --tokens WORDS_PER_DOCUMENT"
        raise UserError(f"{path}: there are more than {MOST_NAMES:,} files and folders in it; {without}") from None
    if count == len(few) and total <= SMALL_BYTES:
        return None
    texts = ((None, read_beginning(file, SMALL_BYTES)[0].decode("utf-8", "replace")) for file in few)
    return _estimated(texts, options, count, str(path))


def _estimated(
    found: Iterator[tuple[str | None, str]] | list[tuple[str | None, str]],
    options: TextOptions,
    count: int,
    source: str,
) -> CountsProbe:
    """Texts of which some are counted."""
    counting = TermCounter(options)
    parts = list(counting.count(_about(islice(found, FEW_DOCUMENTS))))
    place, terms = counting.vocabulary(source)
    kept = join_rows(parts)
    share = counting.documents / count
    nonzeros = float((place[kept.indices] >= 0).sum()) / share
    grown = round(len(terms) / share**GROWTH)
    shape = (count, min(grown, options.max_terms) if options.max_terms else grown)
    told = f"about {shape[0]:,} documents and {shape[1]:,} terms, as {counting.documents:,} documents suggest"
    return _sparse(shape, nonzeros, 1, False, told)


def _about(found: Iterator[tuple[str | None, str]]) -> Iterator[tuple[str | None, str]]:
    """Until there are enough words."""
    letters = 0
    for one in found:
        yield one
        letters += len(one[1])
        if letters > SMALL_BYTES:
            return
