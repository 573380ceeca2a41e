"""A plan answers at once: of large data it reads the first few MB, and mentions it."""

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.config import build_spec
from paceline.data import files
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.data.files import TooManyFiles, iter_below
from paceline.planner.cost_model import build_cost_model
from paceline.workloads.classifier.sections import TextData

LARGE = 1 << 30
"""Bytes of a file, most of which is a hole."""
A_LITTLE = 100 << 20
"""Bytes that may be read of it, several times over."""
TABLE = "a,c,label\n" + "".join(f"{k},{'xyz'[k % 3]},{k % 2}\n" for k in range(30_000))
TEXTS = "text,label\n" + "".join(f"word{k % 7} and term{k % 11} here,{k % 2}\n" for k in range(150_000))
JSONL = "".join(json.dumps({"text": f"word{k % 7} and term{k % 11}", "label": k % 2}) + "\n" for k in range(100_000))
LINES = "".join(f"word{k % 7} and term{k % 11}\n" for k in range(250_000))
MATRIX = f"%%MatrixMarket matrix coordinate integer general\n% counts\n3000 400 {LARGE // 8}\n" + "1 1 1\n" * 100


def large(path: Path, beginning: str) -> Path:
    with path.open("wb") as file:
        file.write(beginning.encode())
        file.truncate(LARGE)
    return path


def bytes_read() -> int:
    """By this process, with all of its threads."""
    return int(Path("/proc/self/io").read_text().split()[1])


def cost_model_of(workload, **data):
    model = {"k": 2} if workload == "topics" else {}
    values = {"name": "x", "workload": workload, "model": model, "train": {"steps": 10}, "data": data}
    return build_cost_model(build_spec(values))


@pytest.mark.parametrize(
    ("name", "beginning", "workload", "data", "note"),
    [
        ("t.csv", TEXTS, "classifier", {"source": "csv"}, "the data were not read"),
        ("t.jsonl", JSONL, "classifier", {"source": "jsonl"}, "the data were not read"),
        ("t.txt", LINES, "lm", {"source": "text"}, "paceline"),
        ("t.csv", TABLE, "trees", {"categories": ["c"]}, "rows like the first 20,000, which were read"),
        ("t.csv", TEXTS, "topics", {}, "as 2,000 documents suggest"),
        ("t.jsonl", JSONL, "topics", {}, "as 2,000 documents suggest"),
        ("t.txt", LINES, "topics", {}, "as 2,000 documents suggest"),
        ("t.mtx", MATRIX, "topics", {}, "they were not read"),
    ],
)
def test_of_a_large_file_a_beginning_is_read(name, beginning, workload, data, note, tmp_path):
    path = large(tmp_path / name, beginning)
    before = bytes_read()
    found = cost_model_of(workload, path=str(path), cache=str(tmp_path / "c"), **data)
    assert bytes_read() - before < A_LITTLE
    assert note in "; ".join(found.assumptions) or (workload == "lm" and found.samples is None)


def test_rows_of_a_table_are_counted_where_its_file_says_how_many(tmp_path):
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    rows = 400_000
    table = pyarrow.table(
        {"a": np.arange(rows, dtype=np.float32), "b": np.arange(rows) % 5, "label": np.arange(rows) % 2}
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "t.feather")
    arrays = {"X": np.stack([table["a"], table["b"]], 1), "y": table["label"].to_numpy()}
    np.savez(tmp_path / "t.npz", **arrays)
    np.savez(tmp_path / "columns.npz", **{**arrays, "X": np.asfortranarray(arrays["X"])})
    for name in ("t.parquet", "t.feather", "t.npz", "columns.npz"):
        found = cost_model_of("trees", path=str(tmp_path / name), cache=str(tmp_path / "cache"), test_fraction=0.25)
        assert found.samples == pytest.approx(0.75 * rows, rel=0.02), name
        assert (found.grown.columns, found.grown.outputs) == (2, 1)
        assert "which were read" in found.assumptions[0]
        assert not (tmp_path / "cache").exists()
    found = cost_model_of("trees", rows=10**15, columns=1000, cache=str(tmp_path))
    assert found.samples == pytest.approx(0.8e15, rel=0.1), "a table that is made up is not made for a plan"


def test_packed_counts_are_not_unpacked(tmp_path):
    import scipy.sparse

    np.savez_compressed(tmp_path / "dense.npz", np.full((5_000, 1000), 3, np.uint16))
    numbers = np.full(1_500_000, 300.0), np.tile(np.arange(30), 50_000), np.arange(0, 1_500_001, 30)
    scipy.sparse.save_npz(tmp_path / "sparse.npz", scipy.sparse.csr_array(numbers, (50_000, 1000)), compressed=False)
    for name, rows, nonzeros, element in (("dense", 5_000, 5e6, 1), ("sparse", 50_000, 1.5e6, 2)):
        counts = cost_model_of("topics", path=str(tmp_path / f"{name}.npz")).counts
        assert (counts.documents, counts.terms, counts.nonzeros) == (rows, 1000, nonzeros)
        assert (counts.sparse, counts.element_bytes) == (name == "sparse", element)


def test_a_row_of_counts_wider_than_memory_is_not_read(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (2, LARGE)})
        file.truncate(file.tell() + 2 * LARGE)
    before = bytes_read()
    assert cost_model_of("topics", path=str(tmp_path / "x.npy")).counts.terms == LARGE
    assert bytes_read() - before < A_LITTLE


def test_prepared_texts_are_found_by_the_note_of_who_prepared_them(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LOOKED_AT_BYTES", 10)
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"some words {k},{k % 2}\n" for k in range(40)))
    data = TextData(source="csv", path=tmp_path / "t.csv", vocab=300, cache=tmp_path / "cache")
    assert LabelledCorpus.cached(data) is None
    prepared = LabelledCorpus.prepare(data)
    assert LabelledCorpus.cached(data).folder == prepared.folder
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"other words {k},{k % 2}\n" for k in range(40)))
    assert LabelledCorpus.cached(data) is None


def test_a_walk_follows_no_links_and_gives_up_where_very_many_files_are(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b", "in/c"):
        (tmp_path / name).symlink_to(tmp_path, target_is_directory=True)
    files = {tmp_path / "in" / "t.txt", tmp_path / ".hidden.txt"}
    for file in files:
        file.touch()
    assert set(iter_below(tmp_path, most=6)) == files
    with pytest.raises(TooManyFiles, match="more than 5 files"):
        list(iter_below(tmp_path, most=5))
