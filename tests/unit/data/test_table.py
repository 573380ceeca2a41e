"""Tables of the user's in columns, the same from every kind of file."""

import gzip
import json

import numpy as np
import pytest
from PIL import Image

from paceline.data import image_folder, read_table
from paceline.data.table_source import ArrowTable
from paceline.data.tables import iter_columns, table_kind
from paceline.errors import RunFailed, UserError
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
    "no column": ("csv", CSV, lambda t: t.numbers("agee"), "unknown-name", "'age'"),
    "no number": ("csv", CSV, lambda t: t.numbers("age", "job"), "invalid-data", "row 1: 'job'"),
    "a gap": ("csv", CSV, lambda t: t.numbers("note"), "invalid-data", "row 1: 'note'"),
    "no category": ("csv", CSV, lambda t: t.codes({"job": ["cook"]}), "invalid-data", "row 1: 'job'"),
    "a short row": ("csv", "a,b\n1,2\n3\n", len, "invalid-format", "row 2"),
    "a header twice": ("csv", "a,b\n1,2\na,b\n", len, "invalid-format", "row 2"),
    "no rows": ("csv", "a,b\n", len, "invalid-data", ""),
    "too large a number": ("jsonl", f'{{"a": {"9" * 400}}}', lambda t: t.numbers("a"), "invalid-data", "row 1"),
    "a list": ("jsonl", "{}\n[1]", len, "invalid-format", "line 2"),
    "another kind": ("xlsx", "x", len, "invalid-format", ".csv"),
}


@pytest.mark.parametrize(("kind", "text", "use", "code", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(kind, text, use, code, named, tmp_path):
    (tmp_path / f"rows.{kind}").write_text(text)
    with expect_error(code) as refused:
        use(read_table(tmp_path / f"rows.{kind}"))
    assert named in str(refused.value)


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "jsonl", "parquet"])
def test_chosen_columns_are_the_same_from_every_kind_of_file(kind, tmp_path):
    file = write(tmp_path, kind)
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


@pytest.fixture
def photos(tmp_path):
    for name, shade, size in (("cat/1.png", 255, (6, 4)), ("cat/2.PNG", 0, (6, 4)), ("dog/deep/3.jpg", 128, (6, 4))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((size[1], size[0]), shade, np.uint8)).save(tmp_path / name)
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    return tmp_path


def test_a_sub_folder_is_a_class(photos):
    found = image_folder(photos)
    assert (len(found), found.classes, found.labels) == (3, ["cat", "dog"], [0, 0, 1])
    image, label = found[0]
    assert (tuple(image.shape), float(image.min()), label) == ((3, 4, 6), 1.0, 0)


def test_size_mode_and_transform(photos):
    assert tuple(image_folder(photos, size=8)[2][0].shape) == (3, 8, 8)
    assert tuple(image_folder(photos, size=(2, 3), mode="L")[2][0].shape) == (1, 2, 3)
    assert image_folder(photos, transform=lambda image: image.size)[2] == ((6, 4), 1)
    assert image_folder(photos, classes=["bird", "cat", "dog"]).labels == [1, 1, 2]


def test_what_is_no_folder_of_images(photos):
    wrong = {"'dog'": {"classes": ["cat"]}, "no images": {"path": photos / "cat"}, "'.*cat'": {"path": photos / "cats"}}
    for named, given in wrong.items():
        with pytest.raises(UserError, match=named):
            image_folder(**{"path": photos, **given})
    (photos / "dog" / "4.png").write_bytes(b"broken")
    with pytest.raises(RunFailed, match=r"4\.png"):
        image_folder(photos, size=4)[2]
