"""Files are whole or absent, and say what is wrong with them."""

import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import RunFailed, UserError
from paceline.io.files import read_json, read_sealed, write_atomic, write_json, write_sealed
from results import expect_error


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_atomic(file, "one")
    write_atomic(file, b"two\n")
    assert file.read_bytes() == b"two\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_is_as_open_to_others_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_atomic(tmp_path / "ours", "")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "usual").stat().st_mode)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    write_atomic(file, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"a\.txt: No space left"):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_json_keeps_order_and_drops_what_is_not_finite(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("content", "why"),
    [(b'{"a": 1', "line 1"), (b"[1]", "holds a list"), (b"\xff\x00", "not JSON"), (b"[" * 100_000, "damaged")],
)
def test_a_damaged_file_is_a_user_error(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "summary.json"
    with pytest.raises(UserError, match="does not exist"):
        read_json(file)
    file.write_bytes(content)
    with pytest.raises(UserError, match=why):
        read_json(file)


def test_a_changed_digit_of_sealed_values_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    value = {"b": (1, 2), "a": {10: np.float32(0.5), 9: math.nan}, "c": "é"}
    write_sealed(file, value)
    assert read_sealed(file) == {"b": [1, 2], "a": {"10": 0.5, "9": None}, "c": "é"}
    file.write_text(file.read_text().replace("0.5", "0.6"))
    with expect_error("damaged", str(file)):
        read_sealed(file)
    write_json(file, {"older": 1})
    assert read_sealed(file) == {"older": 1}
