"""Counts in: every form gives the same numbers in the smallest exact type."""

from __future__ import annotations

import gzip
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.errors import UserError
from paceline.workloads.topics.counts.arrays import from_tensor
from paceline.workloads.topics.counts.matrices import Csr, to_dense, to_sparse
from paceline.workloads.topics.counts.stream import compute_totals, iterate_blocks
from paceline.workloads.topics.files import disk_counts
from paceline.workloads.topics.files.datasets import NumpyDiskDataset, TorchDiskDataset
from paceline.workloads.topics.files.reading import convert, read_counts
from results import expect_error

X = np.random.default_rng(0).poisson(0.4, (57, 33))
SMALL = (np.uint8, np.uint16, np.int32, np.float32)
matrices = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 12), st.integers(1, 9)),
    elements=st.sampled_from([0, 0, 0, 1, 2, 255, 256, 65_535, 65_536, 2**31 - 1]),
).filter(lambda matrix: matrix.any())


def whole(counts, **settings) -> np.ndarray:
    """All documents, put together from blocks; each is checked against the contract."""
    rows = []
    for block in iterate_blocks(counts, **settings):
        values = block.values
        if isinstance(values, Csr):
            assert values.indptr.dtype == np.int64
            assert values.indptr[0] == 0
            assert values.indices.dtype == np.int32
            assert values.data.all()
            for row in range(len(values)):
                assert (np.diff(values.indices[values.indptr[row] : values.indptr[row + 1]]) > 0).all()
            assert values.data.dtype in SMALL
            values = to_dense(values, counts.terms)
        assert values.flags.c_contiguous
        assert values.dtype in SMALL
        assert block.start == sum(map(len, rows))
        assert block.stop == block.start + len(values)
        rows.append(values)
    return np.concatenate(rows)


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "paceline-worker" in thread.name]


def on_disk(folder: Path, array: np.ndarray, name: str = "counts.npy") -> Path:
    np.save(folder / name, array)
    return folder / name


KINDS = ("u1", "i1", "u2", "i2", "u4", "u8", "f2", "f4", "f8", ">i4")
FORMS = {
    "array": lambda x, p: x,
    "columns first": lambda x, p: np.asfortranarray(x),
    "every other column": lambda x, p: np.repeat(x, 2, axis=1)[:, ::2],
    "list": lambda x, p: x.tolist(),
    "tensor": lambda x, p: torch.tensor(x),
    "coo tensor": lambda x, p: torch.tensor(x).to_sparse(),
    "csr tensor": lambda x, p: torch.tensor(x).to_sparse_csr(),
    "csr": lambda x, p: scipy.sparse.csr_matrix(x),
    "csc": lambda x, p: scipy.sparse.csc_array(x),
    "coo": lambda x, p: scipy.sparse.coo_array(x),
    "lil": lambda x, p: scipy.sparse.lil_array(x),
    "dok": lambda x, p: scipy.sparse.dok_array(x),
    "csr in npz": lambda x, p: (scipy.sparse.save_npz(p / "x.npz", scipy.sparse.csr_array(x * 1.0)), p / "x.npz")[1],
    "coo in npz": lambda x, p: (scipy.sparse.save_npz(p / "x.npz", scipy.sparse.coo_array(x)), p / "x.npz")[1],
    "dense npz": lambda x, p: (np.savez(p / "x.npz", X=x), p / "x.npz")[1],
    "mtx": lambda x, p: (scipy.io.mmwrite(p / "x.mtx", scipy.sparse.coo_array(x)), p / "x.mtx")[1],
    "dense mtx": lambda x, p: (scipy.io.mmwrite(p / "x.mtx", x), str(p / "x.mtx"))[1],
    "npy": lambda x, p: on_disk(p, x),
    **{f"npy {kind}": lambda x, p, kind=kind: on_disk(p, x.astype(kind)) for kind in KINDS},
    "npy columns first": lambda x, p: on_disk(p, np.asfortranarray(x)),
    "memory map": lambda x, p: np.load(on_disk(p, x), mmap_mode="r"),
    "part of a memory map": lambda x, p: np.load(on_disk(p, np.vstack([x, x])), mmap_mode="r")[len(x) :],
    "dataset": lambda x, p: NumpyDiskDataset(on_disk(p, x)),
    "torch dataset": lambda x, p: (torch.save(torch.tensor(x), p / "x.pt"), TorchDiskDataset(p / "x.pt"))[1],
    "chosen rows": lambda x, p: NumpyDiskDataset(on_disk(p, np.vstack([x, x])), np.arange(len(x), 2 * len(x))),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_counts(form, tmp_path):
    counts = read_counts(FORMS[form](X, tmp_path))
    few = counts.block(0, 9).values
    assert (few.data if counts.sparse else few).dtype == np.uint8
    assert (counts.documents, counts.terms) == X.shape
    assert (whole(counts, block_bytes=500) == X).all()
    sums = compute_totals(counts)
    assert (sums.per_document == X.sum(1)).all()
    assert (sums.per_term == X.sum(0)).all()
    assert (counts.weights() == (np.count_nonzero(X, axis=1) if counts.sparse else X.shape[1])).all()
    if counts.sparse:
        sizes = [len(block.values.data) * 8 for block in iterate_blocks(counts, block_bytes=900)]
        assert max(sizes) <= 900
        assert len(sizes) < len(X)


@given(matrix=matrices, start=st.integers(0, 11), block_bytes=st.sampled_from([1, 60, 10_000]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_of_any_size_are_exact(matrix, start, block_bytes, tmp_path):
    start = min(start, len(matrix) - 1)
    for source in (
        matrix.astype(np.float64),
        scipy.sparse.coo_array(matrix),
        on_disk(tmp_path, matrix),
        on_disk(tmp_path, matrix.astype(np.float64), "floats.npy"),
    ):
        counts = read_counts(source)
        assert (whole(counts, block_bytes=block_bytes) == matrix).all()
        block = counts.block(start, len(matrix)).values
        data = block.data if isinstance(block, Csr) else block
        part = matrix if counts.resident else matrix[start:]
        expected = np.uint8 if part.max() < 256 else np.uint16 if part.max() < 65_536 else np.int32
        assert data.dtype == expected
        sums = compute_totals(counts, start)
        assert (sums.per_document == matrix[start:].sum(1)).all()
        assert (sums.per_term == matrix[start:].sum(0)).all()


def test_what_is_given_is_neither_copied_nor_changed():
    bytes_ = X.astype(np.uint8)
    assert np.shares_memory(read_counts(bytes_).block(5, 9).values, bytes_)
    csr = scipy.sparse.csr_array(bytes_)
    assert np.shares_memory(read_counts(csr).block(5, 9).values.data, csr.data)
    twice = scipy.sparse.csr_array((np.full(3, 200, np.uint8), [0, 2, 2], [0, 1, 3]), shape=(2, 3))
    assert whole(read_counts(twice)).tolist() == [[200, 0, 0], [0, 0, 400]]
    assert twice.data.tolist() == [200, 200, 200]


def test_fractions_when_allowed(tmp_path):
    fractions = X * 0.5
    convert(fractions, tmp_path / "shards", fractional=True, shard_bytes=300)
    sparse = scipy.sparse.csr_array(fractions)
    for source in (fractions, sparse, on_disk(tmp_path, fractions), tmp_path / "shards"):
        counts = read_counts(source, fractional=True)
        assert (whole(counts, block_bytes=999) == fractions).all()
        sums = compute_totals(counts)
        assert sums.per_document == pytest.approx(fractions.sum(1))
        assert sums.per_term == pytest.approx(fractions.sum(0))
    mixed = np.array([[1, 2.0], [0.5, 2**31]])
    assert whole(read_counts(on_disk(tmp_path, mixed), fractional=True), block_bytes=1).tolist() == mixed.tolist()


def test_names_beside_a_matrix(tmp_path):
    path = on_disk(tmp_path, X)
    assert read_counts(path).vocabulary is None
    (tmp_path / "terms.txt").write_text("".join(f"wörd{i}\n" for i in range(33)), encoding="utf-8")
    (tmp_path / "docs.txt").write_text("".join(f"doc {i}\n" for i in range(57)))
    counts = read_counts(path)
    assert counts.vocabulary[32] == "wörd32"
    assert counts.names[56] == "doc 56"
    (tmp_path / "counts.terms.txt").write_text("x\n" * 33)
    assert read_counts(path).vocabulary == ["x"] * 33
    (tmp_path / "docs.txt").write_text("one\n")
    with expect_error("invalid-data", "docs.txt", match="57 rows"):
        read_counts(path)


def test_files_stored_by_columns_say_that_they_are_slow(tmp_path):
    with pytest.warns(UserWarning, match="Fortran"):
        read_counts(on_disk(tmp_path, np.asfortranarray(X)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_counts(on_disk(tmp_path, X))


@pytest.mark.parametrize("value", [-1, np.nan, np.inf, 0.5, 3e9])
def test_what_is_not_a_count(value, tmp_path):
    matrix = X.astype(np.float64)
    matrix[40, 7] = value
    stored = read_counts(on_disk(tmp_path, matrix))
    for read in (
        lambda: read_counts(matrix),
        lambda: read_counts(scipy.sparse.csr_array(matrix)),
        lambda: read_counts(torch.tensor(matrix)),
        lambda: from_tensor(torch.tensor(matrix)),
        lambda: from_tensor(torch.tensor(matrix).to_sparse_csr()),
        lambda: compute_totals(stored),
        lambda: whole(stored, block_bytes=500),
        *([lambda: read_counts(matrix.astype(np.int8))] if value == -1 else []),
    ):
        with expect_error("invalid-data", match="document 40, term 7 "):
            read()
    assert not readers()
    if value != 0.5 and value != 3e9:
        for source in (matrix, tmp_path / "counts.npy"):
            with pytest.raises(UserError, match="document 40, term 7 "):
                compute_totals(read_counts(source, fractional=True))


@pytest.mark.parametrize(
    "source",
    [
        *(np.zeros(5), np.zeros((2, 3, 4)), np.zeros((0, 4)), np.zeros((4, 0)), scipy.sparse.csr_array((0, 3))),
        *(np.array([["a", "b"]]), np.array([[{}, 1]], object), np.ones((2, 2), complex), {"a": 1}),
        *(torch.zeros(3), torch.ones(2, 2, dtype=torch.complex64)),
    ],
    ids=str,
)
def test_no_matrix(source):
    with expect_error("invalid-data") as error:
        read_counts(source)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
    good = on_disk(tmp_path, X).read_bytes()
    np.savez(tmp_path / "two.npz", a=X, b=X)
    np.save(tmp_path / "objects.npy", np.array([[{}, 1]], object), allow_pickle=True)
    (tmp_path / "folder").mkdir()
    for name, content, code in (
        ("short.npy", good[:-100], "damaged"),
        ("header.npy", good[:40], "damaged"),
        ("other.npy", b"PK something else entirely", "invalid-format"),
        ("nothing.npy", b"", "invalid-format"),
        ("count.npy", None, "not-found"),
        ("x.docx", b"x", "invalid-format"),
        ("zip.npz", b"no zip", "invalid-format"),
        ("text.mtx", b"hello\n", "invalid-format"),
        ("text.mtx.gz", gzip.compress(b"hello\n"), "invalid-format"),
        ("two.npz", None, "invalid-data"),
        ("objects.npy", None, "invalid-data"),
        ("folder", None, "invalid-format"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with expect_error(code, match=name) as caught:
            read_counts(tmp_path / name)
        assert "\n" not in str(caught.value)
    counts = read_counts(tmp_path / "counts.npy")
    (tmp_path / "counts.npy").write_bytes(good[:-50])  # it shrinks while it is read
    with expect_error("damaged"):
        whole(counts, block_bytes=700)


def test_the_reader_stops_with_its_consumer(tmp_path):
    counts = read_counts(on_disk(tmp_path, X))
    stream = iterate_blocks(counts, block_bytes=300)
    assert next(stream).start == 0
    assert readers()
    stream.close()
    assert not readers()
    assert list(iterate_blocks(counts, 7, 7)) == []


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u4", "i8", "f4", "f8"])
@pytest.mark.parametrize("terms", [1, 7, 8, 200, 1003])
def test_nonzeros_found_while_rows_are_read(dtype, terms, tmp_path, monkeypatch):
    """They are those of the block, in its type, whatever is read at a time."""
    monkeypatch.setattr(disk_counts, "SPARSE_BELOW", 1.0)
    monkeypatch.setattr(disk_counts, "PIECE_BYTES", 20_000)
    rng = np.random.default_rng(terms)
    for largest in (1, 255, 300, 65_535):
        matrix = np.where(rng.random((90, terms)) < 0.08, rng.integers(1, largest + 1, (90, terms)), 0)
        if largest > np.iinfo(dtype).max if dtype[0] in "iu" else dtype == "?" and largest > 1:
            continue
        np.save(tmp_path / "x.npy", matrix.astype(dtype))
        counts = read_counts(tmp_path / "x.npy")
        for start, stop in ((0, 90), (3, 4), (17, 90)):
            found, expected = counts.nonzero_rows(start, stop), to_sparse(counts.block(start, stop).values)
            for ours, theirs in zip(found.parts, expected.parts, strict=True):
                assert np.array_equal(ours, theirs)
            assert found.data.dtype == (np.uint8 if found.data.max(initial=0) < 256 else np.uint16)


ODD = [(np.float32, odd) for odd in (0.5, -1.0, np.nan, np.inf, 65_535.5, 65_536.0)]
ODD += [(np.int64, -1), (np.int64, 65_536), (np.uint64, 2**63)]


@pytest.mark.parametrize(("dtype", "odd"), ODD)
@pytest.mark.parametrize("at", [0, 5, 20])
def test_what_is_no_small_count_is_left_to_the_slower_way(dtype, odd, at, tmp_path):
    matrix = np.zeros((60, 21), dtype)
    matrix[40, at], matrix[7, 7] = odd, 9
    if dtype == np.float32:
        matrix[3, 3] = -0.0
    np.save(tmp_path / "x.npy", matrix)
    counts = read_counts(tmp_path / "x.npy")
    assert counts.nonzero_rows(0, 60) is None
    assert counts.nonzero_rows(0, 40).data.tolist() == [9]
    read = iterate_blocks(counts, block_bytes=10 * counts.row_bytes, without_zeros=True)
    if odd in (65_536, 65_536.0):
        assert np.array_equal(np.concatenate([to_dense(b.values, 21) for b in read]), matrix)
    else:
        with pytest.raises(UserError, match=f"document 40, term {at}"):
            list(read)
