"""Data that cannot be used: one line each, with a code, before anything is written."""

import gzip
from pathlib import Path

import pytest
import yaml

from paceline.data.corpora.documents import TokenStreams
from paceline.data.corpora.labelled import open_source
from paceline.workloads.classifier.sections import TextData
from paceline.workloads.lm.sections import LMData
from results import expect_error

GOOD = "text,label\none,a\ntwo,b\n"
CONTENTS = {
    "{good}": GOOD,
    "{numbered}": "text,label\n" + "".join(f"some words,{i}\n" for i in range(10_001)),
    "{cut gzip}": gzip.compress(GOOD.encode() + b"more words,one\n" * 99)[:-12].decode("latin-1"),
}


@pytest.mark.parametrize("row", yaml.safe_load(Path(__file__).with_name("bad_data.yaml").read_text("utf-8")), ids=str)
def test_one_line_says_what_is_wrong(row, tmp_path):
    for name, content in row.get("files", {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(CONTENTS.get(content, content).encode("latin-1"))
    given = {key: tmp_path / value if "path" in key else value for key, value in row["data"].items()}
    with expect_error(row["code"], row.get("key")) as caught:
        if row["data"]["source"] == "text":
            TokenStreams.prepare(LMData(**given, cache=tmp_path / "cache"))
        source = open_source(TextData(**given))
        list(source.train())
        list(source.test())
    assert row.get("named", "rows" if "rows" in row.get("files", ()) else "") in str(caught.value)
    assert "\n" not in str(caught.value)
