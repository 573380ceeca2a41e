"""The text of an adopted run file: each line with where it came from, then what is left to do."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from paceline.config import Parallel, Train
from paceline.convert.draft import ConvertedKey, Draft, RunFileLine
from paceline.convert.rules import Outcome
from paceline.io.escape import to_one_line

ORDER = ("name", "workload", "cluster", "model", "data", "train", "parallel")
KEYS = [*(f"train.{name}" for name in Train.model_fields), *(f"parallel.{name}" for name in Parallel.model_fields)]
COLUMN = 34
WIDTH = 118


def format_run_file(draft: Draft, made_of: Sequence[str]) -> str:
    """The whole file."""
    lines = _wrapped(f"Written by  paceline adopt  from {', '.join(made_of)}.")
    for section in ORDER:
        inside = {key: line for key, line in draft.lines.items() if key.split(".")[0] == section}
        if section in inside:
            lines.append(_line(section, inside[section]))
        elif inside:
            lines.append(f"{section}:")
            lines += [_line(f"  {key.partition('.')[2]}", inside[key]) for key in sorted(inside, key=_place)]
    lines += _block("To fill in:", [f"{key}: {why}" for key, why in draft.fill_in.items()])
    lines += _block("For the scheduler, the shell and the script:", [_note(row) for row in _with(draft, Outcome.NOTED)])
    lines += _block("Not carried over:", [_note(row) for row in _with(draft, Outcome.NOT_SUPPORTED)])
    return "\n".join(lines) + "\n"


def _place(key: str) -> int:
    """In the order of docs/train.md; keys of a workload's own come as they were found."""
    return KEYS.index(key) if key in KEYS else -1


def _with(draft: Draft, outcome: Outcome) -> list[ConvertedKey]:
    return [row for row in draft.rows if row.outcome is outcome]


def _line(key: str, line: RunFileLine) -> str:
    text = f"{key}: {format_scalar(line.value)}"
    return f"{text:<{COLUMN}}  # {to_one_line(line.comment)}" if line.comment else text


def format_scalar(value: Any) -> str:
    """A value as YAML has it, on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True).split("\n...")[0].strip()


def _note(row: ConvertedKey) -> str:
    value = "" if row.value is True or row.value is None else f"={to_one_line(str(row.value))}"
    return f"{row.said}{value if row.given else ''}" + (f": {row.why}" if row.why else "")


def _block(head: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    return [f"# {head}", *(line for item in items for line in _wrapped(to_one_line(item), "#   "))]


def _wrapped(text: str, start: str = "# ") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=f"{start}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
