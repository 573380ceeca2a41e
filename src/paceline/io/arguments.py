"""Check and parse what is typed after a verb: numbers, prices, folders, durations."""

import math
import re
from pathlib import Path

from paceline.errors import Code, UserError

MAX_DIGITS = 18


def option_error(option: str, problem: str, code: Code = "invalid-value") -> UserError:
    """Build the error of an option, as it is typed."""
    return UserError(f"{option}: {problem}", code=code, key=option)


def parse_numbers(text: str, option: str, *, different: bool = False) -> list[int]:
    """Parse `1,2,4`; numbers that must be `different` must be 1 or more too."""
    words = [word.strip() for word in text.split(",") if word.strip() or different]
    plain = all(word.lstrip("-").isdecimal() and len(word) < MAX_DIGITS for word in words)
    found = [int(word) for word in words] if plain else []
    if not found or (different and (min(found) < 1 or len(set(found)) < len(found))):
        kind = "different whole numbers" if different else "numbers"
        raise option_error(option, f"{text[:80]!r} is not a list of {kind}; write it as  {option} 1,2,4")
    return found


def check_price(usd: float | None, option: str = "--price") -> float | None:
    """Return the price, or raise UserError if it is not an amount of money."""
    if usd is not None and not (math.isfinite(usd) and usd >= 0):
        raise option_error(option, f"{usd:g} is not an amount of USD per device and hour; use 0 or more")
    return usd


def make_output_folder(folder: Path, option: str = "--out") -> None:
    """Create the folder that an option names, and its parents; raise UserError naming the option if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise option_error(option, f"{folder} cannot be a folder: {error.strerror}", "not-writable") from None


def check_output_file(file: Path, option: str) -> None:
    """Raise UserError if the file that an option names cannot be written there."""
    if file.is_dir() or not file.parent.is_dir():
        raise option_error(option, f"{file} cannot be written; give a file in a folder that exists", "not-writable")


UNITS_H = {"w": 168.0, "d": 24.0, "h": 1.0, "min": 1 / 60, "m": 1 / 60, "s": 1 / 3600}
PART = r"(\d+(?:\.\d*)?|\.\d+)\s*(min|[wdhms])\s*"
CLOCK = re.compile(r"\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
AMBIGUOUS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?::\d\d)?")


def parse_hours(text: str, key: str = "") -> float:
    """Return the hours of a duration; `key` is the option or key that it was given to."""
    plain = str(text).strip().lower()
    hours: float | None = None
    if CLOCK.fullmatch(plain):
        hours = parse_slurm_time(plain)
    elif re.fullmatch(f"(?:{PART})+", plain):
        hours = sum(float(number) * UNITS_H[unit] for number, unit in re.findall(PART, plain))
    if hours:
        return hours
    before = f"{key} " if key.startswith("--") else f"{key}: " if key else ""
    number = AMBIGUOUS.fullmatch(plain)
    problem = f"{text!r} is not a duration; write it as  2h,  90m,  1d12h  or  1-12:00:00"
    if number and float(number[1]):
        problem = f"{text}: hours or minutes? write it as  {before}{number[1]}h  or  {before}{number[1]}m"
    raise UserError(f"{before}{problem}", code="invalid-value", key=key)


def parse_slurm_time(text: str) -> float | None:
    """Return the hours of what Slurm prints: `30` (minutes), `30:00`, `2:00:00`, `1-12:30:00`; None for `infinite`."""
    days, dash, clock = text.partition("-") if "-" in text else ("0", "", text)
    parts = clock.split(":")
    if not days.isdecimal() or not all(part.isdecimal() for part in parts) or len(parts) > 3:
        return None
    no_hours = [0] * (not dash and len(parts) < 3)
    hours, minutes, seconds = (*no_hours, *map(int, parts), 0, 0)[:3]
    return int(days) * 24 + hours + minutes / 60 + seconds / 3600


def format_slurm_time(hours: float) -> str:
    """Return `D-HH:MM:00` as sbatch reads it, rounded up to whole minutes."""
    minutes = max(1, math.ceil(hours * 60 - 1e-6))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00"
