"""Escape invisible and bidirectional control characters in text from anywhere."""

import re
from collections.abc import Callable
from typing import Any

HIDDEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\\ud800-\\udfff\\ufdd0-\\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\\ufffe\\uffff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)
JOINERS = ("\u200c", "\u200d", "\ufe0e", "\ufe0f", "\ufe0f\u200d")
"""Joiners and selectors that shape the letter or emoji before them, and stay there; a row of them would hide text."""
LAST_LATIN = "\xff"
FORMULA = re.compile(r"[=@]|[-+](?![\d.\s]|$)")


def escape_hidden(text: str) -> str:
    """Escape what would not be seen, as Python does; newlines and tabs stay."""
    return replace_hidden(text, lambda found: found.encode("unicode_escape").decode("ascii"))


def replace_hidden(text: str, spelling: Callable[[str], str]) -> str:
    """Replace each character that would not be seen by its spelling."""
    if text.isascii() and text.isprintable():
        return text

    def replace(found: re.Match[str]) -> str:
        before = text[found.start() - 1 : found.start()]
        return found[0] if found[0] in JOINERS and before > LAST_LATIN else "".join(map(spelling, found[0]))

    return HIDDEN.sub(replace, text)


def escape_values(value: Any) -> Any:
    """Escape every text in nested lists and dicts."""
    if isinstance(value, str):
        return escape_hidden(value)
    if isinstance(value, dict):
        return {escape_hidden(key) if isinstance(key, str) else key: escape_values(v) for key, v in value.items()}
    return [escape_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def escape_cell(value: Any) -> Any:
    """Escape a cell of a .csv file: spreadsheets take a text like `=1` for a formula, unless it begins with a quote."""
    if not isinstance(value, str):
        return value
    text = escape_hidden(value)
    return f"'{text}" if FORMULA.match(text) else text


def to_one_line(text: str) -> str:
    """Escape a text, and put it on one line with single spaces."""
    return " ".join(escape_hidden(text).split())
