"""Tables of the user's in columns, the same from every kind of file."""

import gzip
import json

import numpy as np
import pytest

from paceline.data import read_table
from paceline.errors import UserError

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


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "jsonl", "parquet"])
def test_columns_are_the_same_from_every_kind_of_file(kind, tmp_path):
    table = read_table(write(tmp_path, kind))
    assert len(table) == 2
    assert table.numbers("age").tolist() == [[39.0], [50.0]]
    assert table.numbers("age").dtype == np.float32
    assert table.texts("note") == ["a, b", ""]
    assert table.categories("job", "age") == {"job": ["clerk", "cook"], "age": ["39", "50"]}
    assert table.codes({"job": ["cook", "clerk"], "age": ["39", "50"]}).tolist() == [[1, 0], [0, 1]]


def test_a_file_without_a_header(tmp_path):
    (tmp_path / "rows.csv").write_text("1,x\n2,y\n")
    assert read_table(tmp_path / "rows.csv", names=["a", "b"]).texts("b") == ["x", "y"]


REFUSED = {
    "no column": (CSV, lambda t: t.numbers("agee"), "no column 'agee', did you mean 'age'? (there: age, job, note)"),
    "no number": (CSV, lambda t: t.numbers("age", "job"), "row 1: 'job' is 'clerk', a number was expected"),
    "a gap": (CSV, lambda t: t.numbers("note"), "row 1: 'note' is 'a, b'"),
    "no category": (CSV, lambda t: t.codes({"job": ["cook"]}), "row 1: 'job' is 'clerk', which is none of the 1"),
    "a short row": ("a,b\n1,2\n3\n", len, "row 2 has 1 columns, 2 were expected (a, b)"),
    "no rows": ("a,b\n", len, "there are no rows"),
}


@pytest.mark.parametrize(("text", "use", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(text, use, said, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(UserError) as refused:
        use(read_table(tmp_path / "rows.csv"))
    assert said in str(refused.value)


def test_a_whole_number_that_is_too_large_for_any(tmp_path):
    (tmp_path / "rows.jsonl").write_text(f'{{"a": {"9" * 400}}}')
    with pytest.raises(UserError, match=r"row 1: 'a' is 9{60}, a number was expected"):
        read_table(tmp_path / "rows.jsonl").numbers("a")


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "rows.xlsx").write_text("x")
    with pytest.raises(UserError, match=r"must end in one of \.csv"):
        read_table(tmp_path / "rows.xlsx")
