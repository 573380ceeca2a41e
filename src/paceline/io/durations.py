"""Lengths of time as people and Slurm write them."""

from __future__ import annotations

import re

from paceline.errors import UserError

UNITS_H = {"d": 24.0, "h": 1.0, "m": 1 / 60, "min": 1 / 60, "s": 1 / 3600}


def parse_duration(text: str, option: str = "") -> float:
    """`2h`, `1.5h`, `90m`, `1d12h`, or Slurm's own `30` (minutes), `2:00:00` and `1-12:00:00`."""
    plain = text.strip().lower()
    found = parse_slurm_time(plain)
    if found is None and re.fullmatch(r"(\d+(\.\d+)?(d|h|min|m|s))+", plain):
        found = sum(float(number) * UNITS_H[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([a-z]+)", plain))
    if not found:
        given = f"{option} {text}: this" if option else repr(text)
        raise UserError(f"{given} is not a length of time; write it as  2h,  90m  or  1-12:00:00")
    return found


def parse_slurm_time(text: str) -> float | None:
    """What Slurm means by `30`, `30:00`, `2:00:00`, `1-12` or `1-12:30:00`; None for `infinite` and other words."""
    days, dash, clock = text.partition("-") if "-" in text else ("0", "", text)
    parts = clock.split(":")
    if not days.isdecimal() or not all(part.isdecimal() for part in parts) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return int(days) * 24 + hours + minutes / 60 + seconds / 3600
