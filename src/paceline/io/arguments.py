"""Checks of what is typed after a verb, the same for all of them."""

from __future__ import annotations

import math
from pathlib import Path

from paceline.errors import UserError

MOST_NUMBERS = 64
MOST_DIGITS = 18


def parse_numbers(text: str, option: str, *, different: bool = False) -> list[int]:
    """`1,2,4` as numbers; where they must be `different`, they must be 1 or more too."""
    words = [word.strip() for word in text.split(",") if word.strip() or different]
    plain = all(word.lstrip("-").isdecimal() and len(word) < MOST_DIGITS for word in words)
    found = [int(word) for word in words] if plain else []
    if not found or (different and (min(found) < 1 or len(set(found)) < len(found))):
        kind = "different whole numbers" if different else "numbers"
        raise UserError(f"{option}: {text[:80]!r} is not a list of {kind}; write it as  {option} 1,2,4")
    if len(found) > MOST_NUMBERS and not different:
        raise UserError(f"{option}: {len(found)} numbers are too many; give at most {MOST_NUMBERS}")
    return found


def check_price(usd: float | None, option: str = "--price") -> float | None:
    """What `--price` was given, if it is an amount of money."""
    if usd is not None and not (math.isfinite(usd) and usd >= 0):
        message = f"{option} {usd:g} is not an amount of USD per device and hour; use 0 or more"
        raise UserError(message, code="invalid-value", key=option)
    return usd


def make_output_folder(folder: Path, option: str = "--out") -> None:
    """The folder that an option names."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: {folder} cannot be a folder: {error.strerror}") from None
