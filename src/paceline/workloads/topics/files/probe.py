"""Estimate the size of counts for a plan, from heads of files or beginnings of texts."""

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from paceline.data.files import iter_below, read_beginning, unreadable_error
from paceline.data.npz import read_npz_heads
from paceline.data.tables import open_parquet
from paceline.errors import UserError
from paceline.io.files import check_regular
from paceline.workloads.topics.counts.matrices import check_matrix, find_integer_type, join_rows
from paceline.workloads.topics.files import disk_counts, shards
from paceline.workloads.topics.files.texts import (
    SUFFIXES,
    Document,
    TermCounter,
    TextOptions,
    iterate_documents,
    suffix_of,
)
from paceline.workloads.topics.sizes import CountsSize

SMALL_BYTES = 1 << 22  # smaller files are read whole, and so much is read of larger ones
SMALL_UNPACKED_BYTES = 1 << 23
WIDE_ROW_BYTES = 1 << 26  # of a .npy file: a plan does not read even one such row
PROBED_DOCUMENTS = 2000
MAX_FILES = 100_000
GROWTH = 0.5  # of a vocabulary with its texts: four times as many documents have about twice as many terms


Probe = tuple[CountsSize, str]  # the size of counts, and what was assumed where it is an estimate


def probe_counts(path: Path, options: TextOptions) -> Probe | None:
    """Return the size of counts that are too large to be read; None for small and for invalid ones."""
    name = path.name.lower()
    try:
        if path.is_dir():
            return _probe_shards(path) if (path / shards.MANIFEST).exists() else _probe_folder(path, options)
        if not path.is_file():
            return None
        check_regular(path)
        if name.endswith(".npy"):
            shape, _, dtype, _ = disk_counts.read_npy_header(path)
            wide = len(shape) == 2 and shape[1] * dtype.itemsize > WIDE_ROW_BYTES
            return _make_size(shape, dtype.itemsize, resident=False) if wide else None
        if name.endswith(".npz"):
            return _probe_npz(path)
        if name.endswith(".parquet"):
            return _probe_parquet(path, options)
        if path.stat().st_size <= SMALL_BYTES // (16 if name.endswith(".gz") else 1):
            return None
        if name.endswith((".mtx", ".mtx.gz")):
            return _probe_mtx(path)
        return _probe_texts(path, options) if suffix_of(path) in SUFFIXES else None
    except OSError as error:
        raise unreadable_error(path, error) from None


def _make_size(
    shape: Sequence[int], element: int, resident: bool, assumed: str = "", nonzeros: float | None = None
) -> Probe:
    """Return the size of counts, dense unless the number of nonzeros is given."""
    (documents, terms), sparse = shape, nonzeros is not None
    numbers = float(documents) * terms if nonzeros is None else nonzeros
    size = CountsSize(
        documents=documents,
        terms=terms,
        nonzeros=numbers,
        sparse=sparse,
        element_bytes=element,
        stored_bytes=numbers * (4.0 + element) + 8.0 * documents if sparse else numbers * element,
        resident=resident,
    )
    return size, assumed


def _element_bytes(some: np.ndarray) -> int:
    whole = some.dtype.kind in "bui" or bool((some == np.floor(some)).all())
    kind = find_integer_type(float(some.max(initial=0))) if whole else None
    return kind.itemsize if kind is not None else 4


def _probe_shards(path: Path) -> Probe:
    found = shards.read_shards(path, named=False)
    nonzeros = float(sum(shard.nonzeros for shard in found.shards)) if found.sparse else None
    size, _ = _make_size((found.documents, found.terms), found.row_bytes // found.terms, False, nonzeros=nonzeros)
    return replace(size, stored_bytes=float(found.stored_bytes)), ""


def _probe_npz(path: Path) -> Probe | None:
    heads = read_npz_heads(path, SMALL_BYTES)
    if sum(head.unpacked_bytes for head in heads.values()) <= SMALL_UNPACKED_BYTES:
        return None
    sparse = "format" in heads and {"data", "shape"} <= heads.keys()
    if not sparse and len(heads) != 1:
        return None
    head = heads["data"] if sparse else next(iter(heads.values()))
    sides = heads["shape"].first if sparse else np.array(head.shape)
    if sides.dtype.kind not in "iu" or (sides < 0).any():
        return None  # rejected when it is read
    shape = tuple(sides.ravel().tolist())
    check_matrix(shape, str(path), head.dtype)
    element = _element_bytes(head.first)
    assumed = f"counts of {8 * element} bits, as the first are; the others were not read"
    return _make_size(shape, element, True, assumed, math.prod(head.shape) if sparse else None)


def _probe_mtx(path: Path) -> Probe | None:
    lines = read_beginning(path, SMALL_BYTES)[0].split(b"\n")
    kind = lines[0].lower().split()
    sizes = next((line.split() for line in lines[1:] if line.strip() and not line.startswith(b"%")), [])
    if kind[:2] != [b"%%matrixmarket", b"matrix"] or len(sizes) < 2 or not all(size.isdigit() for size in sizes):
        return None  # rejected when it is read
    shape = (int(sizes[0]), int(sizes[1]))
    check_matrix(shape, str(path))
    twice = 2 if b"symmetric" in kind else 1
    nonzeros = twice * int(sizes[2]) if len(sizes) > 2 else None
    return _make_size(shape, 1, True, "counts of 8 bits; they were not read", nonzeros)


def _probe_parquet(path: Path, options: TextOptions) -> Probe | None:
    indices_name, counts_name = disk_counts.INDICES, disk_counts.COUNTS
    with open_parquet(path, streamed=True) as file:
        about, groups = file.metadata, range(file.metadata.num_row_groups)
        if sum(about.row_group(number).total_byte_size for number in groups) <= SMALL_UNPACKED_BYTES:
            return None
        if not {indices_name, counts_name} <= set(file.schema_arrow.names):
            return _estimate_text_counts(iterate_documents(path, options.column), options, about.num_rows, path)
        some = next(file.iter_batches(PROBED_DOCUMENTS, columns=[indices_name, counts_name], use_threads=False))
        lengths, indices = disk_counts.flatten_lists(some.column(indices_name))
        terms = int(indices.max(initial=0)) + 1
        counts = disk_counts.flatten_lists(some.column(counts_name))[1]
        check_matrix((about.num_rows, terms), str(path), counts.dtype)
    nonzeros = about.num_rows * float(lengths.mean())
    assumed = f"documents like the first {len(lengths):,}, which were read"
    return _make_size((about.num_rows, terms), _element_bytes(counts), False, assumed, nonzeros)


def _probe_texts(path: Path, options: TextOptions) -> Probe:
    text, scale = read_beginning(path, SMALL_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        few = Path(folder) / f"texts{suffix_of(path)}"
        few.write_bytes(text[: text.rfind(b"\n") + 1] or text)
        found: list[Document] = []
        try:
            found.extend(iterate_documents(few, options.column))
        except UserError as error:  # the last document may be cut off
            if not found:
                raise UserError(str(error).replace(str(few), str(path)), code=error.code, key=error.key) from None
    return _estimate_text_counts(found, options, round(len(found) * scale), path)


def _probe_folder(path: Path, options: TextOptions) -> Probe | None:
    few: list[Path] = []
    count, total = 0, 0
    for file in iter_below(path, most=MAX_FILES):
        if file.name.lower().endswith((".txt", ".txt.gz")):
            count += 1
            if len(few) < PROBED_DOCUMENTS and total <= SMALL_BYTES:
                few.append(file)
                total += os.stat(file).st_size
    if count == len(few) and total <= SMALL_BYTES:
        return None
    texts = ((None, read_beginning(file, SMALL_BYTES)[0].decode("utf-8", "replace")) for file in few)
    return _estimate_text_counts(texts, options, count, path)


def _estimate_text_counts(found: Iterable[Document], options: TextOptions, count: int, source: Path) -> Probe:
    counter = TermCounter(options)
    parts = list(counter.count(_take_documents(found)))
    place, terms = counter.vocabulary(source)
    share = counter.documents / count
    nonzeros = float((place[join_rows(parts).indices] >= 0).sum()) / share
    grown = round(len(terms) / share**GROWTH)
    shape = (count, min(grown, options.max_terms) if options.max_terms else grown)
    assumed = f"about {shape[0]:,} documents and {shape[1]:,} terms, as {counter.documents:,} documents suggest"
    return _make_size(shape, 1, False, assumed, nonzeros)


def _take_documents(found: Iterable[Document]) -> Iterator[Document]:
    letters = 0
    for document in islice(found, PROBED_DOCUMENTS):
        yield document
        letters += len(document[1])
        if letters > SMALL_BYTES:
            return
