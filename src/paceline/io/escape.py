"""Text from anywhere as people get to see it: signs that cannot be seen, or turn others around, are spelt out.

Terminal, pages, report.md, LaTeX and pictures show text as it comes from here. Spelt out are control characters, what
Unicode lets a font leave blank (zero-width signs, marks of direction, tags, fillers), and halves of signs. Letters and
spaces of every script stay. So does what is unseen but makes its neighbours what they are: selectors and joiners inside
emoji, joiners of Arabic and Indic letters, breaks between words of scripts without spaces. Each of these stays in its
place and by itself alone: a row of them is how text is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

EMOJI = "\u2190-\u2bff\U0001f000-\U0001faff"
IDEOGRAPHS = "\u2e80-\u3163\u3165-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
JOINING = "\u0620-\u06dc\u06de-\u070e\u0710-\u08e1\u08e3-\u0dff\u1000-\u109f\u1780-\u17b3\u17b6-\u17ff\u1820-\u18aa"
"""Letters and marks of Arabic, Syriac, Indic, Burmese, Khmer and Mongolian, whose form depends on their neighbours."""
VIRAMAS = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca"
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17b3\u17b6-\u17ff"
"""Thai, Lao, Burmese, Khmer."""
IN_PLACE = "|".join(
    (
        "\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f",  # the flag of a region
        f"(?<=[{EMOJI}{IDEOGRAPHS}\u00a9\u00ae\u203c\u2049\u2100-\u218f])[\ufe00-\ufe0f]",
        "(?<=[#*0-9])\ufe0f(?=\u20e3)",  # a key of a telephone
        f"(?<=[{EMOJI}\ufe0f])\u200d(?=[{EMOJI}])",
        f"(?<=[{IDEOGRAPHS}])[\U000e0100-\U000e01ef]",
        f"(?<=[{JOINING}])[\u200c\u200d](?=[{JOINING}])",
        f"(?<=[{VIRAMAS}])[\u200c\u200d]",
        f"(?<=[{UNSPACED}])\u200b(?=[{UNSPACED}])",
        "(?<=[\u1820-\u18aa])[\u180b-\u180f]",
    )
)
HIDDEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\\ud800-\\udfff\\ufdd0-\\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\\ufffe\\uffff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Any of these may have to be spelt out."""


def escape_hidden(text: str) -> str:
    """The text with all spelt out that would not be seen, as Python spells it; lines and tabs stay."""
    return replace_hidden(text, lambda sign: sign.encode("unicode_escape").decode("ascii"))


FORMULA = re.compile(r"[=@]|[-+](?![\d.\s]|$)")


def escape_cell(value: Any) -> Any:
    """A value for a .csv file: spreadsheets take a text that begins like a formula for one, but not behind a quote."""
    if not isinstance(value, str):
        return value
    text = escape_hidden(value)
    return f"'{text}" if FORMULA.match(text) else text


def replace_hidden(text: str, spelling: Callable[[str], str]) -> str:
    """The same with another spelling, a function of the sign."""
    if (text.isascii() and text.isprintable()) or not HIDDEN.search(text):
        return text
    return _hidden_or_in_place().sub(lambda found: found[1] or spelling(found[0]), text)


@cache
def _hidden_or_in_place() -> re.Pattern[str]:
    """Few texts have any, and it takes a moment to compile."""
    return re.compile(f"({IN_PLACE})|{HIDDEN.pattern}")


def escape_values(value: Any) -> Any:
    """The same of every text in lists and tables."""
    if isinstance(value, str):
        return escape_hidden(value)
    if isinstance(value, dict):
        return {
            escape_hidden(key) if isinstance(key, str) else key: escape_values(inner) for key, inner in value.items()
        }
    return [escape_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def to_one_line(text: str) -> str:
    """The same on one line, with single spaces."""
    return " ".join(escape_hidden(text).split())
