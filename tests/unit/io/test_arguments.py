"""What is typed after a verb: durations in one grammar, lists of numbers, prices and folders."""

import math

import pytest

from paceline.io.arguments import (
    check_price,
    format_slurm_time,
    make_output_folder,
    parse_hours,
    parse_numbers,
    parse_slurm_time,
)
from paceline.io.format import duration
from paceline.slurm.site_file import SiteFile
from results import expect_error

ACCEPTED = {"2h": 2, "90m": 1.5, "90min": 1.5, "1.5d": 36, "1d12h": 36, "2w": 336, "1w 2d": 216, "45s": 0.0125}
ACCEPTED |= {"2:00:00": 2, "1-12": 36, "1-12:30:00": 36.5}


@pytest.mark.parametrize(("text", "hours"), ACCEPTED.items())
def test_durations_with_units_or_as_slurm_writes_them(text, hours):
    assert parse_hours(text, "--time") == pytest.approx(hours)
    assert SiteFile(time_limit=text).hours == pytest.approx(hours)


@pytest.mark.parametrize("text", ["30", "1.5", "30:00", "", "0", "0h", "soon", "-2h", "2x", "h", "1h-2"])
def test_other_text_and_numbers_without_a_unit_are_rejected(text):
    with expect_error("invalid-value", "--deadline"):
        parse_hours(text, "--deadline")


@pytest.mark.parametrize("words", ["plan run.yaml --deadline 30", "submit run.yaml --time 30 --dry-run --nodes 1"])
def test_a_number_without_a_unit_gets_the_line_to_type(words, tmp_path, monkeypatch, ask):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("name: r\ntrain: {steps: 10}\n")
    answer = ask(words)
    assert (answer.code, answer.error.code, "30h  or  " in answer.err) == (2, "invalid-value", True)


def test_what_is_printed_can_be_typed():
    for seconds in (12.0, 192, 7500, 86400 * 4.25):
        assert parse_hours(duration(seconds)) * 3600 == pytest.approx(seconds, rel=0.01)


def test_limits_that_slurm_prints_are_in_its_own_grammar():
    printed = {"30": 0.5, "30:00": 0.5, "2:00:00": 2, "1-00:00:00": 24, "infinite": None}
    assert {text: parse_slurm_time(text) for text in printed} == printed
    assert format_slurm_time(36.5) == "1-12:30:00"


def test_lists_of_numbers():
    assert parse_numbers("1, 2,4,", "--devices") == [1, 2, 4]
    assert parse_numbers("0,0,-1", "--devices") == [0, 0, -1]  # what they may be is for the verb to say
    assert parse_numbers("4,1", "--ranks", different=True) == [4, 1]


PLAIN, DIFFERENT = ("", "two", "1;2", "1.5", ","), ("1,1", "0", "-1,2", "1,,2", "")


@pytest.mark.parametrize(("text", "different"), [*((t, False) for t in PLAIN), *((t, True) for t in DIFFERENT)])
def test_what_is_no_list_is_refused(text, different):
    with expect_error("invalid-value", "--ranks", match="--ranks 1,2,4"):
        parse_numbers(text, "--ranks", different=different)


@pytest.mark.parametrize("usd", [-1.0, math.nan, math.inf])
def test_prices_are_amounts(usd):
    assert (check_price(None), check_price(0.0)) == (None, 0.0)
    with expect_error("invalid-value", "--price"):
        check_price(usd)


def test_a_file_in_the_way_of_a_folder_is_said(tmp_path):
    make_output_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "file").touch()
    with expect_error("not-writable", "--out"):
        make_output_folder(tmp_path / "a" / "b" / "file")
