"""What `paceline predict` is given: texts, or a file of them, with all of its columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.files import text_lines
from paceline.data.table import KINDS, rows_of
from paceline.errors import UserError, did_you_mean, listed

TABLES = {**KINDS, ".txt": "txt"}


@dataclass(frozen=True)
class Inputs:
    values: list[Any]
    """What the workload encodes."""
    rows: list[dict[str, Any]]
    """What is written beside each prediction."""


def read_inputs(words: Sequence[str], column: str = "", usual: str = "") -> Inputs:
    """Texts as they are; of a table, the column that is named, else the usual one, else each row as a dict."""
    tables = [word for word in words if _kind(word)]
    if not tables:
        if usual and (others := [word for word in words if _is_file(word)]):
            raise UserError(
                f"{others[0]!r} is a file, and this model reads texts; give a table ({', '.join(TABLES)}) or a text"
            )
        values = [Path(word) if _is_file(word) else word for word in words]
        return Inputs(values, [{"input": str(word)} for word in words])
    if len(words) > 1:
        raise UserError(f"{tables[0]!r} is a table; give it alone, or texts without it")
    path = Path(tables[0])
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"there is no file {str(path)!r}{did_you_mean(path.name, beside)}")
    kind = _kind(tables[0])
    rows = list(_lines(path) if kind == "txt" else rows_of(path, kind))
    if not rows:
        raise UserError(f"{path}: there are no rows")
    wanted = column or ("text" if kind == "txt" else usual)
    if not wanted:
        return Inputs(list(rows), rows)
    for number, row in enumerate(rows, 1):
        if wanted not in row:
            raise UserError(
                f"{path} row {number}: there is no column {wanted!r}{did_you_mean(wanted, row)} "
                f"(there: {listed([*map(str, row)], 12)}); type  --column NAME"
            )
    return Inputs([row[wanted] for row in rows], rows)


def _kind(word: str) -> str:
    """What a word that names a table says of it; a text may end like one, but has a space somewhere."""
    name = word.removesuffix(".gz").lower()
    found = next((kind for suffix, kind in TABLES.items() if name.endswith(suffix)), "")
    return found if found and (_is_file(word) or not any(map(str.isspace, word))) else ""


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or with a sign that none has
        return False


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from ({"text": line.rstrip("\r\n")} for line in text_lines(path) if line.strip())
