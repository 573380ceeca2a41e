"""Names of terms and documents, from text files beside a matrix: one name per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.data.files import open_text
from paceline.errors import UserError


def names_beside(path: Path, documents: int, terms: int) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """(names of the terms, names of the documents): from NAME.terms.txt or terms.txt, and likewise docs.txt."""
    return _names(path, "terms", terms), _names(path, "docs", documents)


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
