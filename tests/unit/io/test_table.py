"""Tables of a terminal: whatever the width, every number is there in full."""

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline.io.table import Table


def printed(table: Table, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, markup=False).print(table)
    return stream.getvalue().splitlines()


NUMBERS = st.floats(0.01, 1e9).map(lambda value: f"{value:,.2f} USD")


@given(st.lists(NUMBERS, min_size=1, max_size=14), st.text("abc +", min_size=1, max_size=60), st.integers(40, 140))
@settings(max_examples=60, deadline=None)
def test_no_number_is_cut_and_no_line_is_too_long(numbers, label, width):
    table = Table("layout", *("cost" for _ in numbers))
    table.add_row(label, *numbers)
    lines = printed(table, width)
    assert all(len(line) <= width for line in lines)
    assert [word for line in lines for word in line.split() if word[0].isdigit()] == [n.split()[0] for n in numbers]
    assert "…" not in "".join(lines)


def test_columns_move_closer_then_text_gives_way_then_numbers_stand_below():
    table = Table("layout", "USD", "device-hours")
    table.add_row("a layout with a long name", "4,349,123.00", "1,234,567")
    assert len(printed(table, 60)) == len(printed(table, 52)) == 2
    assert len(printed(table, 45)) == 3
    assert [line.split()[-1] for line in printed(table, 26) if line[:1] != " "].count("USD") == 1
    assert "4,349,123.00" in "".join(printed(table, 26))
