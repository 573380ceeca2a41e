"""What is typed after a verb: lists of numbers, prices and folders, refused in one line."""

import math

import pytest

from paceline.errors import UserError
from paceline.io.arguments import check_price, make_output_folder, parse_numbers


def test_lists_of_numbers():
    assert parse_numbers("1, 2,4,", "--devices") == [1, 2, 4]
    assert parse_numbers("0,0,-1", "--devices") == [0, 0, -1]  # what they may be is for the verb to say
    assert parse_numbers("4,1", "--ranks", different=True) == [4, 1]


@pytest.mark.parametrize("text", ["", "two", "1;2", "1.5", ","])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(UserError, match="--devices 1,2,4"):
        parse_numbers(text, "--devices")


@pytest.mark.parametrize("text", ["1,1", "0", "-1,2", "1,,2", ""])
def test_numbers_that_must_differ(text):
    with pytest.raises(UserError, match="different"):
        parse_numbers(text, "--ranks", different=True)


@pytest.mark.parametrize("usd", [-1.0, math.nan, math.inf])
def test_prices_are_amounts(usd):
    assert check_price(None) is None
    assert check_price(0.0) == 0.0
    with pytest.raises(UserError, match="USD"):
        check_price(usd)


def test_a_file_in_the_way_of_a_folder_is_said(tmp_path):
    make_output_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be a folder"):
        make_output_folder(tmp_path / "file")
