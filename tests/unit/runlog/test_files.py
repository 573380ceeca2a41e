"""Files are whole or absent, and say what is wrong with them."""

import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import RunFailed
from paceline.io.files import read_json, read_sealed, write_atomic, write_json, write_sealed
from results import expect_error


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError(28, "No space left on device")

    file, usual = tmp_path / "a.txt", tmp_path / "usual"
    write_atomic(file, "one")
    write_atomic(file, b"two\n")
    usual.write_text("")
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    monkeypatch.setattr(os, "fsync", fail)
    with expect_error("disk-full", str(file), RunFailed):
        write_atomic(file, "new")
    assert file.read_bytes() == b"two\n"
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "usual"}


def test_json_keeps_order_and_drops_what_is_not_finite(tmp_path):
    file = tmp_path / "a.json"
    numbers = {"np": np.float32(0.5), "nan": np.float64("nan"), "array": np.array([1.0, -math.inf])}
    write_json(file, {"z": 1, "a": [1.5, math.nan, (math.inf,)], "path": Path("/x"), **numbers, "é": True})
    text = file.read_text()
    assert text.startswith('{\n  "z": 1,\n  "a": [')
    assert text.endswith("}\n")
    assert "é" in text
    plain = {"z": 1, "a": [1.5, None, [None]], "path": "/x", "np": 0.5, "nan": None, "array": [1.0, None], "é": True}
    assert read_json(file) == plain
    assert list(json.loads(text)) == list(plain)


@pytest.mark.parametrize("content", [b'{"a": 1', b"[1]", b"\xff\x00", b"[" * 100_000])
def test_a_damaged_file_is_a_user_error(tmp_path, content):
    file = tmp_path / "summary.json"
    with expect_error("not-found", str(file)):
        read_json(file)
    file.write_bytes(content)
    with expect_error("damaged", str(file)):
        read_json(file)


def test_a_changed_digit_of_sealed_values_is_noticed(tmp_path):
    file = tmp_path / "a.json"
    value = {"b": (1, 2), "a": {10: np.float32(0.5), 9: math.nan}, "c": "é"}
    write_sealed(file, value)
    assert read_sealed(file) == {"b": [1, 2], "a": {"10": 0.5, "9": None}, "c": "é"}
    file.write_text(file.read_text().replace("0.5", "0.6"))
    with expect_error("damaged", str(file)):
        read_sealed(file)
    write_json(file, {"older": 1})
    assert read_sealed(file) == {"older": 1}
