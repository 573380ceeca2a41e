"""Sources: every kind of file gives the same rows, and every broken one says what is wrong; honest docstrings."""

import csv
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import islice

import pyarrow as pa
import pyarrow.parquet
import pytest

from paceline.data.corpora import docstrings, labelled
from paceline.data.corpora.labelled import LabelledCorpus, open_source
from paceline.data.table_source import ArrowTable
from paceline.data.tables import iter_columns, iter_rows, table_kind
from paceline.errors import UserError
from paceline.workloads.classifier.sections import TextData
from results import expect_error

WORDS = ["the ball was kicked", 'he said "yes", twice', "line one\nline two", "", "größer, 世界 🚴", "tab\there"]
ROWS = [(f"{WORDS[i % 6]} {i}" if i % 6 != 3 or i > 3 else "", "news" if i % 3 else "sport") for i in range(240)]


def write(folder, kind, rows, name="rows"):
    if kind == "parquet":
        path = folder / f"{name}.parquet"
        table = pa.table({"id": range(len(rows)), "text": [r[0] for r in rows], "label": [r[1] for r in rows]})
        pa.parquet.write_table(table, path, row_group_size=50)
        return path
    path = folder / f"{name}.{kind}"
    opener = gzip.open if kind.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:  # type: ignore[operator]
        if kind.startswith("jsonl"):
            file.writelines(json.dumps({"id": i, "text": t, "label": y}) + "\n" for i, (t, y) in enumerate(rows))
        else:
            writer = csv.writer(file, delimiter="\t" if kind.startswith("tsv") else ",")
            writer.writerow(["id", "text", "label"])
            writer.writerows((i, t, y) for i, (t, y) in enumerate(rows))
    return path


def source_of(kind):
    return {"tsv": "csv"}.get(kind.removesuffix(".gz"), kind.removesuffix(".gz"))


def opened(path, kind, **fields):
    return open_source(TextData(source=source_of(kind), path=path, **fields))


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "tsv.gz", "jsonl", "jsonl.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    source = opened(write(tmp_path, kind, ROWS), kind)
    assert source.classes() == ("news", "sport")
    train, test = list(source.train()), list(source.test())
    assert list(source.train()) == train, "a second stream gives the same rows"
    expected = [(text, int(label == "sport")) for text, label in ROWS]
    assert Counter(train + test) == Counter(expected), "every row is in exactly one split"
    assert train == [row for row in expected if row in set(train)], "and in the order of the file"
    assert 5 < len(test) < 60

    csv_source = opened(write(tmp_path, "csv", ROWS, "again"), "csv")
    assert (train, test) == (list(csv_source.train()), list(csv_source.test())), "the split depends on the texts alone"
    file = write(tmp_path, kind, ROWS, "test")
    both = opened(file, kind, test_path=file)
    assert list(both.train()) == list(both.test()) == expected


KINDS = ["csv", "csv.gz", "tsv", "jsonl", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_name_and_in_batches(tmp_path, kind):
    file = write(tmp_path, kind, ROWS[:5])
    rows = list(iter_rows(file, table_kind(file)))
    assert [(row["text"], row["label"]) for row in rows] == ROWS[:5]
    with expect_error("unknown-name", "data.label"):
        list(iter_columns(file, table_kind(file), {"data.text": "text", "data.label": "labl"}))
    if kind == "jsonl":
        return
    table = ArrowTable.open(file, table_kind(file), "data.path")
    assert (table.dataset.schema.names, table.count_rows()) == (["id", "text", "label"], 5 if kind == "parquet" else 6)
    for batches in (table.iter_batches(["label", "id"], 1), table.iter_first(["label", "id"], 5)):
        found = [(row["label"], str(row["id"])) for batch in batches for row in batch.to_pylist()]
        assert found == [(row["label"], str(row["id"])) for row in rows]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        (["10", "9", "b"], ("10", "9", "b")),
        ([True, False], ("False", "True")),
        ([1.0, 2.0, -1.0], ("-1", "1", "2")),
        ([" b", "a "], ("a", "b")),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_classes_are_the_sorted_labels(tmp_path, kind, labels, classes):
    source = opened(write(tmp_path, kind, [(f"text {i}", label) for i, label in enumerate(labels * 3)]), kind)
    assert source.classes() == classes


@pytest.mark.parametrize(("rows", "texts"), [(2, 2), (3, 3), (5, 5), (200, 20)])
@pytest.mark.parametrize("fraction", [1e-6, 0.4, 1 - 1e-6])
def test_both_splits_have_a_row_and_no_text_is_in_both(tmp_path, rows, texts, fraction):
    path = write(tmp_path, "csv", [(f"text {i % texts}", i) for i in range(rows)])
    source = opened(path, "csv", test_fraction=fraction)
    train, test = list(source.train()), list(source.test())
    assert len(train) + len(test) == rows
    assert min(len(train), len(test)) > 0
    assert not {text for text, _ in train} & {text for text, _ in test}


def test_limit_takes_the_first_training_rows_and_keeps_the_classes(tmp_path):
    path = write(tmp_path, "csv", [(f"text {i}", i // 50) for i in range(100)])
    whole, part = opened(path, "csv"), opened(path, "csv", limit=7)
    assert list(part.train()) == list(islice(whole.train(), 7))
    assert list(part.test()) == list(whole.test())
    assert part.classes() == ("0", "1")


def test_rows_stream(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n' * 5000 + "broken\n")
    test = write(tmp_path, "jsonl", [("a", 0), ("b", 1)], "test")
    data = TextData(source="jsonl", path=test, test_path=path)
    stream = open_source(data).test()
    assert next(stream) == ("a", 0), "the first rows arrive before the last are read"
    with pytest.raises(UserError, match="line 10001"):
        list(stream)


def test_half_a_character_in_json_is_replaced(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"text": "cut \ud83d", "label": 0}' + "\n" + r'{"text": "whole \ud83d\ude00", "label": 1}' + "\n")
    source = opened(path, "jsonl")
    assert {text for text, _ in [*source.train(), *source.test()]} == {"cut \ufffd", "whole 😀"}


def test_the_fingerprint_is_of_content_and_settings(tmp_path):
    path = write(tmp_path, "csv", ROWS)
    first = opened(path, "csv").fingerprint()
    copy = tmp_path / "copy.csv"
    copy.write_bytes(path.read_bytes())
    assert opened(copy, "csv").fingerprint() == first
    others = [{"limit": 5}, {"test_fraction": 0.2}, {"text": "id"}, {"test_path": copy}]
    prints = {opened(path, "csv", **fields).fingerprint() for fields in others}
    copy.write_bytes(path.read_bytes().replace(b"kicked", b"kicken"))
    prints.add(opened(copy, "csv").fingerprint())
    assert len(prints | {first}) == len(others) + 2


# --- AG News ------------------------------------------------------------------------------------------------------


def ag_folder(folder, train, test='"1","a","b"\n'):
    (folder / "train.csv").write_text(train)
    with gzip.open(folder / "test.csv.gz", "wt") as file:
        file.write(test)
    return open_source(TextData(source="ag_news", path=folder))


def test_ag_news_in_its_original_layout(tmp_path):
    source = ag_folder(tmp_path, '"3","Oil #39;s up","A ""big"" rise\\to  #36;50"\n"4","x","y"\n', '"1","a","b"\n')
    assert source.classes() == ("World", "Sports", "Business", "Sci/Tech")
    assert list(source.train()) == [('Oil\'s up A "big" rise to $50', 2), ("x y", 3)]
    assert list(source.test()) == [("a b", 0)]


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a  quot;crescent quot; of", 'a "crescent " of'),
        ("Ravens #39; Reed doesn #39;t", "Ravens ' Reed doesn't"),
        ("second\\team \\$5", "second team $5"),
        ("J amp;J &lt;b&gt;...&lt;/b&gt;", "J &J <b>...</b>"),
        ("up; down #1; gt; lt", "up; down #1; > lt"),
        ("prices Higher; R&amp;D", "prices Higher; R&D"),
    ],
)
def test_ag_news_is_cleaned_gently(raw, clean):
    assert labelled.unescape_text(raw) == clean


def test_docstrings_are_read_once_balanced_distinct_and_masked(tmp_path, monkeypatch):
    calls, extract = [], docstrings.extract_samples
    monkeypatch.setattr(docstrings, "extract_samples", lambda *given: calls.append(extract(*given)) or calls[-1])
    corpus = LabelledCorpus.prepare(TextData(cache=tmp_path, vocab=4096))
    ((train, test),) = calls
    assert (len(corpus.train), len(corpus.test)) == (len(train), len(test))
    assert corpus.classes == ("numpy", "scipy", "torch", "standard library")
    for split in (train, test):
        assert len(set(Counter(label for _, label in split).values())) == 1
    texts = [text for text, _ in train + test]
    assert len(texts) == len(set(texts)) > 3000
    assert 0.07 < len(test) / len(texts) < 0.13
    assert min(Counter(label for _, label in train[:400]).values()) > 60, "any first part is a fair sample"
    for text in texts:
        assert len(text.split()) >= docstrings.MIN_WORDS
        assert not any(name in text.lower() for name in ("numpy", "scipy", "torch", "python", ">>>"))


def test_no_module_is_in_both_splits():
    modules = [[f"{m} {i}" for i in range(m % 7 + 1)] for m in range(60)]
    train, test = docstrings.split_by_module(modules, 0.2)
    assert not {text.split()[0] for text in train} & {text.split()[0] for text in test}
    assert 0.15 < len(test) / (len(train) + len(test)) <= 0.2


def test_nothing_is_imported_and_the_order_is_fixed():
    """In two fresh interpreters with different hash seeds: the same files, and none of the packages loaded."""
    code = (
        "import sys, zlib; from paceline.data.corpora import docstrings as d; d.ENOUGH_PER_CLASS = 60;"
        "print(zlib.crc32(repr(d.extract_samples(0.2, d.mask_names)).encode()),"
        "[m for m in ('numpy', 'scipy', 'torch') if m in sys.modules])"
    )
    said = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        said.add(subprocess.check_output([sys.executable, "-c", code], env=env, text=True))
    assert len(said) == 1
    assert said.pop().strip().endswith("[]")


def test_docstrings_of_a_source_text():
    source = (
        '"module"\nclass A:\n "class"\n def f(self):\n  "method"\nif x:\n async def g():\n  "in a branch"\n'
        'add_newdoc("pkg", "name", ("member", """of something in C"""))\ndef h():\n return "no docstring"\n'
    )
    found = list(docstrings.iter_docstrings(source))
    assert found == ["module", "class", "method", "in a branch", "name", "member", "of something in C"]
    assert list(docstrings.iter_docstrings("def broken(:")) == []
