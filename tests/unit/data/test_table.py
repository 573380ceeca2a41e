"""What `paceline.data` offers for a workload's `data`: tables by column and folders of images."""

import json

import numpy as np
import pytest
from PIL import Image

from paceline.data import image_folder, read_table
from paceline.errors import RunFailed, UserError
from results import expect_error

ROWS = [{"age": 39, "job": "clerk", "note": "a, b"}, {"age": 50, "job": "cook", "note": ""}]
CSV = 'age, job ,note\n39, clerk,"a, b"\n50,cook,\n'


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_are_the_same_from_every_kind_of_file(kind, tmp_path):
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), file)
    else:
        texts = {
            "csv": CSV,
            "tsv": "age\tjob\tnote\n39\tclerk\ta, b\n50\tcook\t\n",
            "jsonl": "\n".join(map(json.dumps, ROWS)),
        }
        file.write_text(texts[kind])
    table = read_table(file)
    assert len(table) == 2
    assert table.numbers("age").tolist() == [[39.0], [50.0]]
    assert table.numbers("age").dtype == np.float32
    assert table.texts("note") == ["a, b", ""]
    assert table.categories("job", "age") == {"job": ["clerk", "cook"], "age": ["39", "50"]}
    assert table.codes({"job": ["cook", "clerk"], "age": ["39", "50"]}).tolist() == [[1, 0], [0, 1]]


def test_a_file_without_a_header(tmp_path):
    (tmp_path / "rows.csv").write_text("1,x\n2,y\n")
    assert read_table(tmp_path / "rows.csv", names=["a", "b"]).texts("b") == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "use", "code", "named"),
    [
        (CSV, lambda t: t.numbers("agee"), "unknown-name", "'age'"),
        (CSV, lambda t: t.numbers("age", "job"), "invalid-data", "row 1: 'job'"),
        (CSV, lambda t: t.numbers("note"), "invalid-data", "row 1: 'note'"),
        (CSV, lambda t: t.codes({"job": ["cook"]}), "invalid-data", "row 1: 'job'"),
        ("a,b\n", len, "invalid-data", "rows.csv"),
        ("a,b\n1,2\na,b\n", len, "invalid-format", "row 2"),
    ],
    ids=["column", "number", "gap", "category", "rows", "header"],
)
def test_what_a_table_rejects(text, use, code, named, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with expect_error(code) as rejected:
        use(read_table(tmp_path / "rows.csv"))
    assert named in str(rejected.value)


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
    assert tuple(image_folder(photos, size=(2, 3), mode="L")[2][0].shape) == (1, 2, 3)
    assert image_folder(photos, transform=lambda image: image.size)[2] == ((6, 4), 1)
    assert image_folder(photos, classes=["bird", "cat", "dog"]).labels == [1, 1, 2]


def test_what_a_folder_of_images_rejects(photos):
    wrong = {"'dog'": {"classes": ["cat"]}, "no images": {"path": photos / "cat"}, "cats": {"path": photos / "cats"}}
    for named, given in wrong.items():
        with pytest.raises(UserError) as rejected:
            image_folder(**{"path": photos, **given})
        assert named in str(rejected.value)
    (photos / "dog" / "4.png").write_bytes(b"broken")
    with pytest.raises(RunFailed, match=r"4\.png"):
        image_folder(photos, size=4)[2]
