"""The short forms in which Slurm writes host names and task counts: `n[01-03,7],m2` and `2(x3),1`."""

from __future__ import annotations

import itertools
import re

from paceline.errors import UserError

MOST_HOSTS = 65536

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts(text: str) -> list[str]:
    """The host names of a node list, in order; a range keeps the zeros it is written with."""
    found: list[str] = []
    for word in _words(text):
        parts = re.split(r"\[([^\[\]]*)\]", word)  # prefix, ranges, middle, ranges, …, suffix
        if any("[" in part or "]" in part for part in parts) or not word:
            raise _unreadable(text)
        choices = [[part] if index % 2 == 0 else _numbers(part, text) for index, part in enumerate(parts)]
        found += map("".join, itertools.product(*choices))
        if len(found) > MOST_HOSTS:
            raise UserError(f"node list {text!r} names more than {MOST_HOSTS} hosts")
    return found


def task_counts(text: str) -> list[int]:
    """Tasks on each node of a step: `2(x3),1` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None:
            raise UserError(f"{text!r} is not a list of task counts such as  2(x3),1")
        counts += [int(match[1])] * min(int(match[2] or 1), MOST_HOSTS)
    return counts


def _words(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for span in ranges.split(","):
        match = _SPAN.fullmatch(span)
        if match is None:
            raise _unreadable(text)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise _unreadable(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(text: str) -> UserError:
    return UserError(f"{text!r} is not a node list such as  n[1-3,7],m2")
