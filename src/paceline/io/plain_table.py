"""Tables of a terminal: columns without lines, in which no number is ever cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

LEAST_TEXT = 12
"""Characters that a column of text keeps, where columns have to give way."""


class PlainTable:
    """A few columns of text, and columns of numbers beside them.

    Where there is too little room, columns move closer together, then text is broken into lines, then the numbers that
    are left over stand below, with the text repeated.
    """

    def __init__(self, *head: str, left: int = 1, remark: bool = False) -> None:
        """The first `left` columns are text, and the last where it is a remark."""
        self.head, self.left, self.remark = head, left, remark
        self.rows: list[tuple[Sequence[str], str]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        self.rows.append((cells, style))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        widths = [
            max(len(row[place]) for row in (self.head, *(cells for cells, _ in self.rows))) for place in self._all
        ]
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= options.max_width else 1
        if sum(widths) + gap * (len(widths) - 1) > options.max_width:
            self._narrow(widths, options.max_width, gap)
        for columns in self._blocks(widths, options.max_width, gap):
            yield self._drawn([*range(self.left), *columns], widths, gap)

    @property
    def _all(self) -> range:
        return range(len(self.head))

    def _narrow(self, widths: list[int], room: int, gap: int) -> None:
        """Take from the widest column of text what is missing, as long as there is enough of it."""
        for place in sorted(range(self.left), key=lambda place: -widths[place]):
            missing = sum(widths) + gap * (len(widths) - 1) - room
            widths[place] -= max(0, min(missing, widths[place] - LEAST_TEXT))

    def _blocks(self, widths: Sequence[int], room: int, gap: int) -> list[list[int]]:
        """The columns of numbers, as many beside each other as there is room for."""
        text = sum(widths[: self.left]) + gap * self.left
        blocks: list[list[int]] = [[]]
        used = text
        for place in range(self.left, len(self.head)):
            if blocks[-1] and used + widths[place] > room:
                blocks.append([])
                used = text
            blocks[-1].append(place)
            used += widths[place] + gap
        return blocks

    def _drawn(self, places: Sequence[int], widths: Sequence[int], gap: int) -> Any:
        from rich.table import Table

        out = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
        for place in places:
            text = place < self.left or (self.remark and place == len(self.head) - 1)
            justify: Any = "left" if text else "right"
            out.add_column(self.head[place], justify=justify, width=widths[place], overflow="fold")
        for cells, style in self.rows:
            out.add_row(*(cells[place] for place in places), style=style)
        return out
