"""Texts in: the counts of scikit-learn's vectoriser, from every kind of file."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.workloads.topics.counts.matrices import to_dense
from paceline.workloads.topics.counts.stream import compute_totals
from paceline.workloads.topics.files import texts as text
from paceline.workloads.topics.files.reading import convert, read_counts
from paceline.workloads.topics.files.texts import WORDS, TextOptions, read_stop_words, read_text
from paceline.workloads.topics.workload import Topics
from results import expect_error

TEXTS = [
    "The cat sat on the mat, and the cat slept.",
    "Dogs and cats: a cat isn't a dog. Ünïcode straße ÉTÉ!",
    "",
    "the stock market fell; markets fall, stock by stock",
    "A dog sat by the market in 2024_x.",
    "cat dog stock mat",
]
ENGLISH = read_stop_words("english")
ALL = TextOptions(stop_words=None, min_df=1, max_df=1.0)


def dense(counts) -> np.ndarray:
    return to_dense(counts.block(0, counts.documents).values, counts.terms)


@given(
    texts=st.lists(st.text(alphabet="abcAB é.-_1 \n", max_size=30), min_size=1, max_size=12),
    min_df=st.sampled_from([1, 2, 0.3]),
    max_df=st.sampled_from([1.0, 0.5, 3]),
    stop=st.sampled_from([None, ["aa", "ab"]]),
)
@settings(max_examples=120, deadline=None)
def test_counts_are_those_of_scikit_learn(texts, min_df, max_df, stop):
    theirs = CountVectorizer(min_df=min_df, max_df=max_df, stop_words=stop, token_pattern=WORDS.pattern)
    ours = TextOptions(min_df=min_df, max_df=max_df, stop_words=stop)
    try:
        expected = theirs.fit_transform(texts).toarray()
    except ValueError:
        with pytest.raises(UserError):
            read_text(texts, ours)
        return
    counts = read_text(texts, ours)
    assert counts.vocabulary == theirs.get_feature_names_out().tolist()
    assert (dense(counts) == expected).all()


def test_numbers_and_markup_are_no_terms():
    review = ["Great&amp;cheap<br /><br>50 of 1,000 b2b &lt; 3 <3 a<b R&D<!-- no -->"]
    assert read_text(review, ALL).vocabulary == ["b2b", "cheap", "great", "of"]
    assert {"br", "amp"} < set(read_text(review, replace(ALL, markup=True)).vocabulary)
    assert "222 English stop words" in replace(ALL, stop_words="english", max_terms=5).rules()


def test_the_most_frequent_terms():
    theirs = CountVectorizer(max_features=2, stop_words=sorted(ENGLISH)).fit(TEXTS)
    assert read_text(TEXTS, TextOptions(min_df=1, max_df=1.0, max_terms=2)).vocabulary == sorted(theirs.vocabulary_)


def test_batches_make_no_difference(monkeypatch, tmp_path):
    whole = read_text(TEXTS * 20, ALL)
    monkeypatch.setattr(text, "BATCH_TOKENS", 7)
    parts = read_text(TEXTS * 20, ALL)
    assert (dense(whole) == dense(parts)).all()
    (tmp_path / "x.txt").write_text("\n".join(line for line in TEXTS if line), encoding="utf-8")
    shards = convert(tmp_path / "x.txt", tmp_path / "s", text=ALL, shard_bytes=60)
    again = read_text(tmp_path / "x.txt", ALL)
    assert shards.vocabulary == again.vocabulary
    block = shards.block(0, 5).values
    assert ((block if isinstance(block, np.ndarray) else to_dense(block, shards.terms)) == dense(again)).all()


def files(folder) -> dict:
    """The same texts as files of every kind."""
    (folder / "texts" / "more").mkdir(parents=True)
    for number, content in enumerate(TEXTS):
        where = folder / "texts" / ("more" if number > 2 else "") / f"{number}.txt"
        where.write_text(content, encoding="utf-8")
    csv = "id,text\n" + "".join(f'{i},"{t}"\n' for i, t in enumerate(TEXTS))
    (folder / "x.csv").write_text(csv, encoding="utf-8")
    (folder / "x.csv.gz").write_bytes(gzip.compress(csv.encode()))
    (folder / "x.tsv").write_text("id\ttext\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(TEXTS)), encoding="utf-8")
    lines = "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS))
    (folder / "x.jsonl").write_text(lines)
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(6)), "text": TEXTS}), folder / "x.parquet")
    return {name: folder / name for name in ("texts", "x.csv", "x.csv.gz", "x.tsv", "x.jsonl", "x.parquet")}


def test_every_kind_of_file_gives_the_same(tmp_path):
    expected = read_text(TEXTS)
    for name, path in files(tmp_path).items():
        counts = read_counts(path)
        assert counts.vocabulary == expected.vocabulary == ["cat", "dog", "market", "mat", "sat", "stock"], name
        assert (dense(counts) == dense(expected)).all(), name
        shards = convert(path, tmp_path / f"{name}-shards")
        assert shards.vocabulary == expected.vocabulary
        assert (compute_totals(shards).per_document == compute_totals(expected).per_document).all(), name
        if name != "texts":
            named = read_text(path, TextOptions(name_column="id"))
            assert named.names == ["0", "1", "2", "3", "4", "5"], name
    assert read_counts(tmp_path / "texts").names[-1] == "more/5.txt"


def test_stop_words(tmp_path):
    assert {"the", "and", "of", "we", "is"} <= ENGLISH
    assert "model" not in ENGLISH
    (tmp_path / "stop.txt").write_text("cat\ndog\n")
    found = read_text(TEXTS, TextOptions(stop_words=str(tmp_path / "stop.txt"), max_df=1.0)).vocabulary
    assert "cat" not in found
    assert "the" in found
    with pytest.raises(UserError, match="stop_words=klingon"):
        read_text(TEXTS, TextOptions(stop_words="klingon"))


@pytest.mark.parametrize("name", ["00000.bin", "terms.txt", "counts.json"])
def test_damage_to_counted_texts_is_named_and_mended(name, tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS * 2))
    data = {"path": str(tmp_path / "t.jsonl"), "cache": str(tmp_path / "cache")}
    spec = build_spec({"workload": "topics", "model": {"k": 2}, "data": data})
    first = Topics(spec)
    first.prepare(lambda line: None)
    (entry,) = (path for path in (tmp_path / "cache" / "topics").iterdir() if path.is_dir())
    whole = (entry / name).read_bytes()
    (entry / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    said = []
    again = Topics(spec)
    again.prepare(said.append)
    assert [line for line in said if "is damaged (" in line and name in line]
    assert (entry / name).read_bytes() == whole
    assert np.array_equal(dense(again.counts), dense(first.counts))
    assert again.counts.vocabulary == first.counts.vocabulary
    assert sorted(path.name for path in entry.parent.iterdir()) == [entry.name, f"{entry.name}.lock"]


def test_bad_texts(tmp_path):
    def reject(name, code, shown="", content=None, options=None):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with expect_error(code, match=shown or None) as caught:
            read_text(tmp_path / name, options)
        assert "\n" not in str(caught.value)

    reject("x.csv", "unknown-name", "'texts'", b"id,texts\n1,a\n")
    reject("x.csv", "unknown-name", "'name'", b"id,text\n1,a\n", TextOptions(name_column="name"))
    reject("x.jsonl", "invalid-data", "line 1", b'{"text": 3}\n')
    reject("x.txt", "invalid-format", "iconv", "été\n".encode("latin-1"))
    reject("empty.txt", "invalid-data", "empty.txt", b"")
    reject("x.txt", "invalid-data", "min_df=2", b"cat\n\n")
    reject("missing.csv", "not-found", "missing.csv")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"fine")
    (tmp_path / "texts" / "b.txt").write_bytes(b"\xff\xfe broken")
    reject("texts", "invalid-format", "b.txt")
