"""Tables in memory: pandas, polars, Arrow, or whatever else exports an Arrow stream."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import InvalidData, not_installed
from paceline.io.files import expand_cache, write_atomic


def is_frame(value: Any) -> bool:
    """Return whether it is a table in memory."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns")


def to_arrow(frame: Any) -> Any:
    """Return the table as a `pyarrow.Table`, without an index; pandas columns of mixed objects become text."""
    try:
        import pyarrow
    except ImportError:
        raise not_installed("a table in memory", "pyarrow", "paceline[parquet]") from None
    if type(frame).__module__.partition(".")[0] != "pandas":
        return pyarrow.table(frame)
    arrays = {}
    for name in frame.columns:
        column = frame[name]
        try:
            arrays[str(name)] = pyarrow.array(column, from_pandas=True)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            arrays[str(name)] = pyarrow.array(column.astype(str).where(column.notna(), None), from_pandas=True)
    return pyarrow.table(arrays)


def build_frame_like(frame: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a table of the same library as `frame`, with its index if it has one."""
    library = type(frame).__module__.partition(".")[0]
    if library == "pandas":
        import pandas

        return pandas.DataFrame(list(rows), index=frame.index)
    if library == "polars":
        return type(frame)(list(rows))
    import pyarrow

    return pyarrow.Table.from_pylist(list(rows))


def store_frame(frame: Any, key: str) -> Path:
    """Write the table as Parquet into the cache, named by its content, and return the path."""
    table = to_arrow(frame)
    if not table.num_rows:
        raise InvalidData(f"{key}: the table has no rows", key=key)
    import pyarrow.parquet

    content = io.BytesIO()
    pyarrow.parquet.write_table(table.replace_schema_metadata(None), content)
    name = hashlib.sha256(content.getvalue()).hexdigest()[:24]
    file = expand_cache(Path("~/.cache/paceline")) / "frames" / f"{name}.parquet"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content.getvalue())
    return file
