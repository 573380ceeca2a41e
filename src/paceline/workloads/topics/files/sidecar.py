"""Names of terms and documents, from text files that lie beside a matrix: one name per line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.data.files import open_text
from paceline.errors import UserError
from paceline.workloads.topics.counts.blocks import Counts


def labelled(counts: Any, path: Path) -> Counts:
    """The counts of a file, named: by NAME.terms.txt or terms.txt beside it, and likewise docs.txt."""
    return replace(counts, vocabulary=_names(path, "terms", counts.terms), names=_names(path, "docs", counts.documents))


def _names(path: Path, what: str, expected: int) -> Sequence[str] | None:
    stem = path.name.removesuffix(".gz").rpartition(".")[0]
    for file in (path.with_name(f"{stem}.{what}.txt"), path.with_name(f"{what}.txt")):
        if file.is_file():
            lines = read_names(file)
            if len(lines) == expected:
                return lines
            side = "columns" if what == "terms" else "rows"
            raise UserError(
                f"{file}: {len(lines):,} lines, but {path.name} has {expected:,} {side}; give one line for each, or "
                f"move {file.name} away"
            )
    return None


def read_names(file: Path) -> list[str]:
    with open_text(file) as text:
        return [line.rstrip("\r\n") for line in text]
