"""The one table value: for the terminal, pages, files and notebooks."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any, Literal

from paceline.errors import UserError
from paceline.io.escape import escape_cell, escape_hidden
from paceline.io.format import number, wrap_lines

MIN_TEXT_WIDTH, MAX_WORD_WIDTH = 12, 32
UNKNOWN = "–"  # a cell without a value
Align = Literal["left", "right"]


@dataclass(frozen=True)
class Column:
    name: str
    align: Align = "right"


class Table:
    """Columns, rows of formatted cells, and the rows to mark.

    In a narrow terminal no number is cut: columns move closer together, then text is folded, then the numbers that are
    left over are drawn in a second block, with the leading columns of text repeated.
    """

    def __init__(
        self, *columns: str | Column, left: int = 1, name: str = "", title: str = "", note: str = "", mark: bool = False
    ) -> None:
        """The first `left` columns are text; with `mark` a terminal shows a tick beside the chosen row."""
        self.columns = [
            column if isinstance(column, Column) else Column(column, "left" if place < left else "right")
            for place, column in enumerate(columns)
        ]
        self.left, self.name, self.title, self.note, self.mark = left, name, title, note, mark
        self.answer = ""  # a sentence that a page begins with
        self.rows: list[tuple[str, ...]] = []
        self.styles: list[str] = []
        self.chosen: int | None = None
        self.failed: set[int] = set()
        """Rows with a reason in their second cell, and no numbers."""

    @property
    def head(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def add_row(self, *cells: str, style: str = "", chosen: bool = False) -> None:
        if chosen:
            self.chosen = len(self.rows)
        self.rows.append(cells)
        self.styles.append(style)

    def add_failed_row(self, label: str, reason: str) -> None:
        self.failed.add(len(self.rows))
        self.add_row(label, f"✗ {reason}", *[""] * (len(self.columns) - 2))

    def to_csv(self) -> str:
        """Return the cells as they are shown; none of them can start a formula."""
        return format_csv((self.head, *self.rows))

    def to_lines(self) -> list[str]:
        """Return the rows as lines of any width, quickly."""
        rows = (self.head, *self.rows)
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        form = "  ".join(
            f"{{:{'<' if column.align == 'left' else '>'}{width}}}"
            for column, width in zip(self.columns, widths, strict=True)
        )
        return [form.format(*row).rstrip() for row in rows]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        tick = [Column("", "left")] if self.mark else []
        left, columns = self.left + len(tick), [*tick, *self.columns]
        places = [place for place in range(len(self.rows)) if place not in self.failed]
        ticks = {place: ("✓" if place == self.chosen else " ",) * len(tick) for place in places}
        rows = [((*ticks[place], *self.rows[place]), self.styles[place]) for place in places]
        heads = [column.name for column in columns]
        widths = [max(len(cells[i]) for cells in (heads, *(cells for cells, _ in rows))) for i in range(len(columns))]
        room = options.max_width
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= room else 1
        texts = [i for i, column in enumerate(columns) if column.align == "left"]
        words = {
            i: [word for cells in (heads, *(cells for cells, _ in rows)) for word in cells[i].split()] for i in texts
        }
        _narrow_text(widths, {i: max(map(len, words[i]), default=0) for i in texts}, room, gap)
        for block in _split_blocks(widths, left, room, gap):
            yield _build_rich_table(columns, rows, [*range(left), *block], widths, gap)
        for place in sorted(self.failed):
            label, reason, *_ = self.rows[place]
            yield from wrap_lines(f"{label}: {reason.removeprefix('✗ ')}", "✗ ")


def format_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Format rows as lines of a .csv file, in which no cell can start a formula."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(escape_cell, row) for row in rows)
    return text.getvalue()


def _narrow_text(widths: list[int], longest: Mapping[int, int], room: int, gap: int) -> None:
    """Narrow the widest text columns in place until the table fits, or to their `longest` words."""
    for place in sorted(longest, key=lambda place: -widths[place]):
        missing = sum(widths) + gap * (len(widths) - 1) - room
        least = max(MIN_TEXT_WIDTH, min(longest[place], MAX_WORD_WIDTH))
        widths[place] -= max(0, min(missing, widths[place] - least))


def _split_blocks(widths: Sequence[int], left: int, room: int, gap: int) -> list[list[int]]:
    """Group the columns after the leading text, as many side by side as there is room for."""
    text = sum(widths[:left]) + gap * left
    blocks: list[list[int]] = [[]]
    used = text
    for place in range(left, len(widths)):
        if blocks[-1] and used + widths[place] > room:
            blocks.append([])
            used = text
        blocks[-1].append(place)
        used += widths[place] + gap
    return blocks


def _build_rich_table(
    columns: Sequence[Column],
    rows: Sequence[tuple[Sequence[str], str]],
    places: Sequence[int],
    widths: Sequence[int],
    gap: int,
) -> Any:
    from rich.table import Table as RichTable

    drawn = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for place in places:
        column = columns[place]
        drawn.add_column(column.name, justify=column.align, width=widths[place], overflow="fold")
    for cells, style in rows:
        drawn.add_row(*(cells[place] for place in places), style=style)
    return drawn


SHOWN_ROWS = 50


class Tabular:
    """What `paceline.train`, `plan`, `measure`, `check` and `report` return."""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        raise NotImplementedError

    def rows_of_table(self) -> Sequence[dict[str, Any]]:
        """Return plain values by name; every row has the same names."""
        raise NotImplementedError

    def table(self, *, frame: bool = False) -> Any:
        """Return the rows as a list of dicts; as a pandas DataFrame with `frame`."""
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
            f"<tr>{''.join(f'<td>{escape(escape_hidden(_format_cell(row.get(name))))}</td>' for name in shown)}</tr>"
            for row in rows[:SHOWN_ROWS]
        )
        left = f"<p>and {len(rows) - SHOWN_ROWS:,} more</p>" if len(rows) > SHOWN_ROWS else ""
        return f"<p>{escape(escape_hidden(self.headline))}</p><table><tr>{head}</tr>{body}</table>{left}"


def _is_plain(value: Any) -> bool:
    """Return whether a cell can show it: no list, and not nothing."""
    return value is not None and value != "" and not isinstance(value, list | tuple | dict)


def _format_cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "✓" if value else ""
    return number(value) if isinstance(value, int | float) else str(value)
