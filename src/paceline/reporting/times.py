"""Results that are there already: a table of (devices, seconds), and a third column of names where there are several.

devices,seconds            gpus,time,model
1,19.53                    1,19.53,small
4,42.34                    4,42.34,small
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.plain_files import read_text

COUNTS = ("devices", "gpus", "ranks", "n", "processes", "nodes", "workers", "cores")
TIMES = ("seconds", "time", "time_s", "s", "step_s", "duration", "elapsed")
MOST_LINES = 100_000
MOST_BYTES = 1 << 24
MOST_DEVICES = 1_000_000_000


@dataclass(frozen=True)
class TimesLine:
    devices: int
    seconds: float
    line: int


def read_times_file(path: Path) -> dict[str, list[TimesLine]]:
    """Rows by name; a row that is given twice is a repeat."""
    try:
        text = read_text(path, MOST_BYTES, "utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    sample = text[:2000]
    delimiter = max(",;\t", key=sample.count) if any(c in sample for c in ",;\t") else ","
    lines = [(n, row) for n, row in enumerate(csv.reader(text.splitlines(), delimiter=delimiter), 1) if any(row)]
    lines = [(n, [cell.strip() for cell in row]) for n, row in lines if not row[0].lstrip().startswith("#")]
    if not lines:
        raise UserError(f"{path} is empty; it needs lines such as  1,19.5  for one device and 19.5 seconds")
    if len(lines) > MOST_LINES:
        raise UserError(f"{path} has {len(lines)} lines; at most {MOST_LINES} are read")
    count, time, name = _columns(path, lines[0][1])
    body = lines if _is_number(lines[0][1][count]) else lines[1:]
    found: dict[str, list[TimesLine]] = {}
    for number, row in body:
        label = row[name] if name is not None and name < len(row) else path.stem
        found.setdefault(label, []).append(_row(path, number, row, count, time))
    for label, rows in found.items():
        if not any(row.devices == 1 for row in rows):
            which = f" for {label!r}" if len(found) > 1 else ""
            counted = f"{path}: speed-up is counted from one device, and there is no such line"
            raise UserError(f"{counted}{which}; add  1,SECONDS")
    if not found:
        raise UserError(f"{path} has a heading and no rows; add lines such as  1,19.5")
    return found


def _columns(path: Path, head: list[str]) -> tuple[int, int, int | None]:
    """Places of devices, seconds and, where there is one, the name."""
    if len(head) < 2:
        raise UserError(f"{path}: line 1 has one column; give two, devices and seconds, as in  1,19.5")
    if _is_number(head[0]) and _is_number(head[1]):
        return 0, 1, 2 if len(head) > 2 else None
    words = [word.lower() for word in head]
    count = next((i for i, word in enumerate(words) if word in COUNTS), None)
    time = next((i for i, word in enumerate(words) if word in TIMES), None)
    if count is None or time is None:
        raise UserError(f"{path}: line 1 is  {','.join(head)[:60]};  head the columns  devices,seconds")
    return count, time, next((i for i in range(len(head)) if i not in (count, time)), None)


def _row(path: Path, number: int, row: list[str], count: int, time: int) -> TimesLine:
    try:
        devices, seconds = int(row[count]), float(row[time])
    except (ValueError, IndexError):
        raise UserError(f"{path} line {number}: {','.join(row)[:60]!r} is not devices and seconds") from None
    if not 1 <= devices <= MOST_DEVICES or not (math.isfinite(seconds) and seconds > 0):
        given = f"{row[count]:.20} devices and {seconds:g} s"
        raise UserError(f"{path} line {number}: {given} are not possible")
    return TimesLine(devices, seconds, number)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
