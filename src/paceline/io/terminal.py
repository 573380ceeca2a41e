"""What reaches the terminal: text, and nothing that steers it or hides in it, wherever the text was read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paceline.io.escape import escape_hidden

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 100
"""Of all that is shown on a terminal or in a log."""


def print_text(text: object, end: str = "\n") -> None:
    """To standard output."""
    print(escape_hidden(str(text)), end=end, flush=True)


def warn(text: object) -> None:
    """To standard error."""
    print(escape_hidden(str(text)), file=sys.stderr, flush=True)


def print_file(text: str) -> None:
    """A file on standard output: into a pipe as it is, and on a terminal as it can be seen."""
    print(escape_hidden(text) if sys.stdout.isatty() else text, end="")


def build_console(**options: Any) -> Console:
    """A console of rich that shows texts as they are: no markup, and no escape sequences but its own.

    As wide as the terminal; in a pipe, as wide as our tables may be.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **kwargs: Any) -> Text:
            return super().render_str(escape_hidden(text), **kwargs)  # before it is given its place in a table

        def render(self, *args: Any, **kwargs: Any) -> Any:
            for part in super().render(*args, **kwargs):
                yield part if part.control else Segment(escape_hidden(part.text), part.style)

    width = None if (options.get("file") or sys.stdout).isatty() else COLUMNS
    return PlainConsole(**{"highlight": False, "markup": False, "emoji": False, "width": width, **options})
