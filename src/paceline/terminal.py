"""What reaches the terminal: text, and nothing that steers it, wherever the text was read."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
COLUMNS = 100
"""Of all that is shown on a terminal or in a log."""


def visible(text: str) -> str:
    """The text with its control characters spelt out."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def spelt_out(text: str) -> str:
    """The text for a page: control characters are spelt out, and signs that turn the direction of others."""
    return STEERING.sub(lambda found: repr(found[0])[1:-1], text)


def console(**options: Any) -> Console:
    """A console of rich that shows texts as they are: no markup, and no escape sequences but its own.

    As wide as the terminal; in a pipe, as wide as our tables may be.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Any:
            for part in super().render(*args, **kwargs):
                yield part if part.control else Segment(visible(part.text), part.style)

    width = None if (options.get("file") or sys.stdout).isatty() else COLUMNS
    return PlainConsole(**{"highlight": False, "markup": False, "emoji": False, "width": width, **options})
