"""Tables: whatever the width of a terminal, every number is there in full; results as rows and in a notebook."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency import Row, measured
from paceline.errors import UserError
from paceline.io import table
from paceline.io.table import Table, Tabular
from results import render_text


def printed(table, width):
    return render_text(table, width=width).splitlines()


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


ALONE, TWO = (Row(ranks, 1.0, (1.0,) * 3, 0.1, 0.5, 0.1, frozenset()) for ranks in (1, 2))
RUN = {"name": "made", "data": {"source": "docstrings"}, "train": {"steps": 20, "global_batch": 16}}


def test_a_measurement_is_a_line_rows_and_a_table(tmp_path):
    found = measured(tmp_path, (RUN, 0.1, [ALONE, TWO], 2, None))
    assert repr(found) == f"<Measurement: made: {found.verdict[0]}>"
    assert [row["label"] for row in found.table()] == ["1 rank", "2 ranks"]
    assert found._repr_html_().count("<tr>") == 3
    assert "2 ranks" in found._repr_html_()


class Wicked(Tabular):
    headline = "<b>"

    def rows_of_table(self):
        return [{"a<": "<script>", "list": [1], "none": None, "yes": True, "half": 0.5}] * 60


def test_a_table_is_harmless_and_short():
    text = Wicked()._repr_html_()
    assert "<b>" not in text
    assert "<script>" not in text
    assert "<th>list</th>" not in text
    assert "and 10 more" in text
    assert "<td>✓</td><td>0.5</td>" in text


def test_a_frame_needs_pandas_and_says_so(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(table, "import_module", missing)
    with pytest.raises(UserError, match="pip install pandas"):
        Wicked().table(frame=True)
