"""Tables of the user's, the same from every kind of file."""

import gzip
import json

import pytest

from paceline.data.table_source import ArrowTable
from paceline.data.tables import check_table, iter_columns, iter_rows, table_kind
from results import expect_error

ROWS = [{"age": 39, "job": "clerk", "note": "a, b"}, {"age": 50, "job": "cook", "note": ""}]
CSV = 'age,job,note\n39, clerk,"a, b"\n50,cook,\n'


def write(folder, kind):
    file = folder / f"rows.{kind}"
    if kind == "csv":
        file.write_text(CSV)
    elif kind == "csv.gz":
        file.write_bytes(gzip.compress(CSV.encode()))
    elif kind == "tsv":
        file.write_text(CSV.replace('"a, b"', "a; b").replace(",", "\t").replace(";", ","))
    elif kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file


REFUSED = {
    "a short row": ("csv", "a,b\n1,2\n3\n", "invalid-format", "row 2"),
    "a list": ("jsonl", "{}\n[1]", "invalid-format", "line 2"),
    "another kind": ("xlsx", "x", "invalid-format", ".csv"),
}


@pytest.mark.parametrize(("kind", "text", "code", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(kind, text, code, named, tmp_path):
    (tmp_path / f"rows.{kind}").write_text(text)
    with expect_error(code) as refused:
        list(iter_rows(*check_table(tmp_path / f"rows.{kind}", "data.path")))
    assert named in str(refused.value)


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "jsonl", "parquet"])
def test_rows_and_columns_are_the_same_from_every_kind_of_file(kind, tmp_path):
    file = write(tmp_path, kind)
    whole = [(str(row["age"]), row["job"].strip(), row["note"]) for row in iter_rows(file, table_kind(file))]
    assert whole == [("39", "clerk", "a, b"), ("50", "cook", "")]
    rows = list(iter_columns(file, table_kind(file), {"--a": "note", "--b": "job", "--c": "note"}))
    assert [(number, values[0], values[1].strip()) for number, values in rows] == [
        (1, "a, b", "clerk"),
        (2, "", "cook"),
    ]
    with expect_error("unknown-name", "data.label"):
        list(iter_columns(file, table_kind(file), {"data.text": "job", "data.label": "jobb"}))


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "parquet"])
def test_arrow_batches(kind, tmp_path):
    file = write(tmp_path, kind)
    table = ArrowTable.open(file, table_kind(file), "data.path")
    assert table.columns == ["age", "job", "note"]
    for batches in (table.iter_batches(["age", "job"], 1), table.iter_first(["age", "job"], 5)):
        rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        ages = ["39", "50"] if kind != "parquet" else [39, 50]
        assert [(age, job.strip()) for age, job in rows] == list(zip(ages, ["clerk", "cook"], strict=True))
    assert table.count_rows() == 2
