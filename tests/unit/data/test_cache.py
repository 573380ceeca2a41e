"""What is kept from earlier runs: arrays that are whole, or said to be damaged."""

import threading

import numpy as np
import pytest

from paceline.data.cache import ArrayWriter, DamagedEntry, _verified, describe_array, map_array, verify_entry


@pytest.fixture
def array(tmp_path):
    with ArrayWriter(tmp_path / "x.npy", np.int64) as file:
        file.append(np.arange(20))
    assert file.facts == describe_array(tmp_path / "x.npy")
    return tmp_path / "x.npy"


def test_an_array_with_any_bit_of_its_header_flipped_is_the_same_or_damaged(array):
    """Numpy reads a header as Python, so that it may fail as Python does; `<` and `>` differ by one bit."""
    facts = describe_array(array)
    whole, damaged = array.read_bytes(), 0
    for place in range(8 * (whole.index(b"}") + 1)):  # blanks follow
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        array.write_bytes(content)
        _verified.clear()
        try:
            verify_entry(array.parent, {"x.npy": facts})
        except DamagedEntry:
            damaged += 1
        else:
            assert map_array(array).tolist() == list(range(20))
    assert damaged > 100


def test_an_array_that_is_cut_short_is_damaged(array):
    whole = array.read_bytes()
    for size in (0, 5, 9, 60, len(whole) - 1):
        array.write_bytes(whole[:size])
        with pytest.raises(DamagedEntry, match=r"x\.npy"):
            map_array(array)


def test_headers_are_parsed_by_one_thread(tmp_path, monkeypatch):
    """Python 3.11 fails now and then where two parse at a time ("AST constructor recursion depth mismatch")."""
    files = {}
    for name in "abcd":
        with ArrayWriter(tmp_path / f"{name}.npy", np.uint8) as writer:
            writer.append(np.arange(9, dtype=np.uint8))
        files[writer.path.name] = writer.facts
    loaded, threads = np.load, []
    monkeypatch.setattr(np, "load", lambda *args, **how: threads.append(threading.get_ident()) or loaded(*args, **how))
    verify_entry(tmp_path, files)
    assert threads == [threading.get_ident()] * 4
