"""Results that are tables: one line in a terminal, a table in a notebook, rows for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

from paceline.errors import UserError
from paceline.io.escape import escape_hidden
from paceline.io.format import number

SHOWN_ROWS = 50


class Tabular:
    """What `paceline.train`, `plan`, `measure`, `check` and `report` return."""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        raise NotImplementedError

    def rows_of_table(self) -> Sequence[dict[str, Any]]:
        """Plain values by name; every row has the same names."""
        raise NotImplementedError

    def table(self, *, frame: bool = False) -> Any:
        """The rows as a list of dicts; as a pandas DataFrame with `frame`."""
        rows = list(self.rows_of_table())
        if not frame:
            return rows
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise UserError("table(frame=True) needs pandas; install it with  pip install pandas") from None
        return pandas.DataFrame(rows)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {escape_hidden(self.headline)}>"

    def _repr_html_(self) -> str:
        rows = list(self.rows_of_table())
        shown = [name for name in (rows[0] if rows else ()) if any(_is_plain(row.get(name)) for row in rows)]
        head = "".join(f"<th>{escape(escape_hidden(name))}</th>" for name in shown)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(escape_hidden(_cell(row.get(name))))}</td>' for name in shown)}</tr>"
            for row in rows[:SHOWN_ROWS]
        )
        left = f"<p>and {len(rows) - SHOWN_ROWS:,} more</p>" if len(rows) > SHOWN_ROWS else ""
        return f"<p>{escape(escape_hidden(self.headline))}</p><table><tr>{head}</tr>{body}</table>{left}"


def _is_plain(value: Any) -> bool:
    """Something that a cell can say: no list, and not nothing."""
    return value is not None and value != "" and not isinstance(value, list | tuple | dict)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "✓" if value else ""
    return number(value) if isinstance(value, int | float) else str(value)
