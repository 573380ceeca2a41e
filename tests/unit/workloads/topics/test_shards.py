"""Shards: the same counts in less room, whole or not there, and damage is named."""

from __future__ import annotations

import json
import shutil
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from synthetic_counts import zipf_documents

from paceline.errors import UserError
from paceline.workloads.topics.counts.matrices import Counts, Csr, to_dense
from paceline.workloads.topics.counts.stream import compute_totals
from paceline.workloads.topics.files.reading import convert, read_counts
from paceline.workloads.topics.files.shards import read_shards, write_shards
from results import expect_error

X = np.random.default_rng(0).poisson(0.4, (157, 33))
FOREIGN = {"data": "object", "rows": -1, "segments": 0, "file": "../x", "index": "S9"}


def rows_of(counts, start=0, stop=None) -> np.ndarray:
    values = counts.block(start, counts.documents if stop is None else stop).values
    return to_dense(values, counts.terms) if isinstance(values, Csr) else values


@pytest.fixture
def folder(tmp_path):
    """Counts in some ten shards."""
    convert(X, tmp_path / "shards", shard_bytes=500)
    return tmp_path / "shards"


@given(
    matrix=hnp.arrays(
        np.int64,
        st.tuples(st.integers(1, 30), st.sampled_from([1, 5, 40])),
        elements=st.sampled_from([0] * 30 + [1, 1, 2, 255, 256, 65_536, 2**31 - 1]),
    ).filter(lambda matrix: matrix.any()),
    shard_bytes=st.sampled_from([60, 300, 100_000]),
    form=st.sampled_from([np.asarray, scipy.sparse.csr_array]),
    ends=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shards_hold_the_same_counts(matrix, shard_bytes, form, ends, tmp_path):
    shutil.rmtree(tmp_path / "s", ignore_errors=True)
    counts = convert(form(matrix), tmp_path / "s", shard_bytes=shard_bytes)
    start, stop = sorted(min(end, len(matrix)) for end in ends)
    if start < stop:
        assert (rows_of(counts, start, stop) == matrix[start:stop]).all()
    assert (counts.documents, counts.terms) == matrix.shape
    sums = compute_totals(counts)
    assert (sums.per_document == matrix.sum(1)).all()
    assert (sums.per_term == matrix.sum(0)).all()
    if counts.sparse:
        assert (counts.weights() == np.count_nonzero(matrix, axis=1)).all()


def test_many_terms_take_two_bytes_each_or_four_where_documents_are_short(tmp_path):
    counts, _, _ = zipf_documents(300, 200_000, 5, avg_doc_length=300)
    written = convert(counts, tmp_path / "s")
    shard = written.shards[0]
    assert (shard.layout, shard.index, shard.segments, shard.data) == ("csr", "uint16", 4, "uint8")
    assert written.stored_bytes < 3.2 * shard.nonzeros
    back = written.block(0, written.documents)
    for part in ("indptr", "indices", "data"):
        assert (getattr(back.values, part) == getattr(counts.values, part)).all()
    assert (rows_of(written, 100, 103) == rows_of(counts, 100, 103)).all()
    thin = scipy.sparse.csr_array(([1, 2, 3], [0, 4_000_000, 70_000], [0, 1, 2, 3]), shape=(3, 4_000_001))
    written = convert(thin, tmp_path / "thin")
    assert (written.shards[0].index, written.shards[0].segments) == ("int32", 1)
    assert written.block(0, 3).values.indices.tolist() == [0, 4_000_000, 70_000]


def test_rare_large_counts_do_not_widen_all(tmp_path):
    matrix = X.copy()
    matrix[100, 7] = 70_000
    matrix[3, 0] = 300
    for form in (np.asarray, scipy.sparse.csr_array):
        written = convert(form(matrix), tmp_path / form.__name__)
        assert (written.shards[0].data, written.shards[0].large) == ("uint8", 2)
        assert (rows_of(written) == matrix).all()
        assert rows_of(written, 0, 3).dtype == np.uint8
        assert rows_of(written, 3, 4).dtype == np.uint16
        assert rows_of(written, 100, 101).dtype == np.int32


def test_layout_is_chosen_by_size(tmp_path):
    full, thin = np.ones((50, 40), np.uint8), np.zeros((50, 40), np.uint8)
    thin[:, 0] = 1
    for times in (1, 20):
        matrix = np.vstack([full, *[thin] * times])
        counts = convert(matrix, tmp_path / f"s{times}", shard_bytes=800)
        assert {shard.layout for shard in counts.shards} == {"dense", "csr"}
        assert counts.sparse == (times > 1)
        assert (rows_of(counts) == matrix).all()
    assert (counts.weights() == np.count_nonzero(matrix, axis=1)).all()


def test_conversion_of_files_keeps_names(tmp_path):
    np.save(tmp_path / "x.npy", X.astype(np.float32))
    (tmp_path / "terms.txt").write_text("".join(f"t{i}\n" for i in range(33)))
    (tmp_path / "docs.txt").write_text("".join(f"d{i}\n" for i in range(157)))
    said = []
    convert(tmp_path / "x.npy", tmp_path / "deep" / "s", shard_bytes=500, log=said.append)
    counts = read_counts(str(tmp_path / "deep" / "s"))
    assert (rows_of(counts) == X).all()
    assert counts.vocabulary[-1] == "t32"
    assert counts.names[-1] == "d156"
    assert said[-1].startswith("shards: 157 documents")
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["s"]
    again = convert(counts, tmp_path / "again")
    assert again.vocabulary == counts.vocabulary


def test_parquet_lists(tmp_path):
    csr = scipy.sparse.csr_array(X)
    lists = {
        name: [values[a:b].tolist() for a, b in zip(csr.indptr[:-1], csr.indptr[1:], strict=True)]
        for name, values in (("indices", csr.indices[::1]), ("counts", csr.data))
    }
    lists["indices"][5], lists["counts"][5] = lists["indices"][5][::-1], lists["counts"][5][::-1]
    pyarrow.parquet.write_table(pyarrow.table(lists), tmp_path / "x.parquet", row_group_size=40)
    counts = read_counts(tmp_path / "x.parquet")
    assert not counts.resident
    assert counts.terms == np.flatnonzero(X.any(0)).max() + 1
    assert (rows_of(counts, 35, 130) == X[35:130]).all()
    assert (counts.weights() == np.count_nonzero(X, axis=1)).all()
    assert compute_totals(counts).per_term.sum() == X.sum()
    assert (rows_of(convert(tmp_path / "x.parquet", tmp_path / "s")) == X).all()
    (tmp_path / "terms.txt").write_text("t\n" * 60)
    assert read_counts(tmp_path / "x.parquet").terms == 60


def test_bad_parquet(tmp_path):
    def reject(code, shown="", **columns):
        if columns:
            pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
        with expect_error(code, match=shown or None) as caught:
            compute_totals(read_counts(tmp_path / "x.parquet"))
        assert "\n" not in str(caught.value)

    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    reject("unreadable")
    reject("invalid-data", "lists", indices=[1, 2], counts=[1, 2])
    reject("invalid-data", "document 1", indices=[[1], [1, 2]], counts=[[1], [1]])
    reject("invalid-data", "row group 0", indices=[[-1], [1]], counts=[[1], [1]])
    reject("invalid-data", "is -4", indices=[[1], [1]], counts=[[1], [-4]])
    reject("invalid-data", indices=pyarrow.array([[]], pyarrow.list_(pyarrow.int32())), counts=[[1]])
    reject("unknown-name", "'text'", body=["some words"])


def test_a_damaged_shard_is_named(folder):
    whole = read_shards(folder)
    assert len(whole.shards) > 5
    victim = folder / whole.shards[3].file
    content = victim.read_bytes()
    for damaged in (content[:-1], content + b"x"):
        victim.write_bytes(damaged)
        with expect_error("damaged", match=victim.name):
            read_counts(folder)
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    counts = read_counts(folder)
    assert rows_of(counts, 0, 5).shape == (5, 33)
    with pytest.raises(UserError, match=f"{victim.name}: .*checksum"):
        compute_totals(counts)
    victim.unlink()
    for read in (lambda: read_counts(folder), lambda: rows_of(whole)):
        with expect_error("unreadable", match=victim.name):
            read()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"format": 99}, "invalid-format"),
        ({"documents": 5}, "damaged"),
        ({"terms": None}, "damaged"),
        ({"shards": [{"file": "x"}]}, "damaged"),
        ({"shards": []}, "damaged"),
        *(({wrong: value}, "damaged") for wrong, value in FOREIGN.items()),
    ],
)
def test_a_damaged_manifest(folder, change, code):
    """It gives types and sizes of what is read, so it is checked before."""
    manifest = json.loads((folder / "counts.json").read_text())
    (manifest["shards"][0] if change.keys() <= FOREIGN.keys() else manifest).update(change)
    (folder / "counts.json").write_text(json.dumps(manifest))
    with expect_error(code, "counts.json"):
        read_counts(folder)
    (folder / "counts.json").write_text("{")
    with pytest.raises(UserError, match=r"counts.json is damaged"):
        read_counts(folder)


def test_what_is_there_is_not_overwritten(folder, tmp_path):
    with pytest.raises(UserError, match="exists"):
        convert(X, folder)
    with pytest.raises(UserError, match="fractional=True"):
        convert(X / 2, tmp_path / "halves")
    (tmp_path / "empty").mkdir()
    assert convert(X, tmp_path / "empty").documents == 157
    with pytest.raises(UserError, match="all 3 x 2 counts are zero"):
        convert(np.zeros((3, 2)), tmp_path / "zeros")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "shards"]


def test_a_shard_with_a_term_beyond_its_terms_is_refused(tmp_path):
    """Its checksum is right: somebody made it so."""
    folder = tmp_path / "shards"
    rows = np.zeros((3, 400), np.uint8)
    rows[:, 7] = 5
    write_shards(folder, [rows], 400, Counts())
    manifest = json.loads((folder / "counts.json").read_text())
    shard = manifest["shards"][0]
    assert (shard["layout"], shard["index"]) == ("csr", "uint16")
    file = folder / shard["file"]
    content = file.read_bytes().replace(b"\x07\x00" * 3, b"\x07\x00" * 2 + b"\xff\x7f")
    file.write_bytes(content)
    shard["crc32"] = f"{zlib.crc32(content):08x}"
    (folder / "counts.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="400 terms"):
        read_shards(folder).block(0, 3)
