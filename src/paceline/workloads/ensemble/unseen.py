"""Rows that no member has learned from: weights found on others would trust the members that remember them best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.table import rows_of
from paceline.errors import UserError
from paceline.record.run_dir import RunDir
from paceline.workload import Say
from paceline.workloads.ensemble.rows import RowSet, kind_of

MOST = 0.5
"""Part of the rows that members may have seen, and that is left out."""
INSTEAD = "give other rows as  data.path=FILE,  or have the members trained here:  model.members=[A.yaml,B.yaml]"


def test_table(runs: list[Path]) -> Path:
    """The one that all members were tested on, and none learned from."""
    found = {str(getattr(RunDir(run).recorded_spec().data, "test_path", None) or "") for run in runs}
    if len(found) != 1 or "" in found:
        raise UserError(
            "data.path is not given, and the runs have no data.test_path in common; name a table with rows that none "
            "of them learned from, as  data.path=FILE"
        )
    return Path(found.pop())


def unseen(rows: RowSet, runs: list[Path], say: Say) -> RowSet:
    """The rows without those that some run learned from; UserError where these are most of them."""
    seen = np.zeros(len(rows), bool)
    for run in runs:
        table: Any = getattr(RunDir(run).recorded_spec().data, "path", None)
        if table is None or not kind_of(Path(table)) or not Path(table).is_file():
            say(f"  what {run} learned from is not a table that is still there: it is not checked for these rows")
            continue
        found = _also_in(rows, Path(table))
        if found.mean() > MOST:
            raise UserError(
                f"{found.sum():,} of the {len(rows):,} rows of {rows.file} are in {table}, which {run} learned from; "
                f"{INSTEAD}"
            )
        seen |= found
    if seen.any():
        say(f"  {seen.sum():,} of the {len(rows):,} rows are left out: members learned from the same")
    return rows.some(~seen)


def _also_in(rows: RowSet, table: Path) -> np.ndarray:
    """Which rows hold what some row of the table holds, in all columns that both have."""
    if table.resolve() == rows.file.resolve():
        return np.ones(len(rows), bool)
    first: dict[str, Any] = next(rows_of(table, kind_of(table)), {})
    columns = [name for name in rows.columns if name in first]
    if not columns:
        return np.zeros(len(rows), bool)
    other = RowSet(table, np.arange(_count(table)), ())
    known = set(other.keys(columns))
    return np.array([key in known for key in rows.keys(columns)], bool)


def _count(table: Path) -> int:
    return sum(1 for _ in rows_of(table, kind_of(table)))
