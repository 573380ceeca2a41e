"""Print to the terminal, with hidden and control characters escaped."""

import sys
from typing import TYPE_CHECKING, Any

from paceline.io.escape import escape_hidden

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 100  # width of tables and logs


def print_text(text: object, end: str = "\n") -> None:
    """Print to standard output."""
    print(escape_hidden(str(text)), end=end, flush=True)


def warn(text: object) -> None:
    """Print to standard error."""
    print(escape_hidden(str(text)), file=sys.stderr, flush=True)


def print_file(text: str) -> None:
    """Print the content of a file: unchanged into a pipe, escaped on a terminal."""
    print(escape_hidden(text) if sys.stdout.isatty() else text, end="")


def build_console(**options: Any) -> "Console":
    """Build a rich console without markup and escape sequences in texts; in a pipe it has the width of tables."""
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
