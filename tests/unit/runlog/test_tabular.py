"""Results in one line, as rows and as a table of a notebook."""

import pytest

from consistency import Row, measured
from paceline.errors import UserError
from paceline.io import table
from paceline.io.table import Tabular

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
