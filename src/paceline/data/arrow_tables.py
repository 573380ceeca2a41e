"""Read tables as Arrow record batches: csv, tsv (gzip or not), Parquet, Arrow IPC and Feather. Needs pyarrow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.files import invalid_data, read_beginning
from paceline.data.tables import open_parquet
from paceline.errors import UserError

ARROW_KINDS = {f".{kind}": kind for kind in ("csv", "tsv", "parquet", "feather")} | {".pq": "parquet", ".arrow": "ipc"}
MISSING_VALUES = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"]
"""Fields of a csv file that are read as null."""
HEAD_BYTES = 1 << 22


@dataclass(frozen=True)
class ArrowTable:
    """A file that can be scanned from its beginning any number of times."""

    path: Path
    kind: str
    dataset: Any

    @classmethod
    def open(cls, path: Path, kind: str, key: str, text_columns: Collection[str] = ()) -> ArrowTable:
        """Open a file of one of ARROW_KINDS; `key` is the field of the run file that named it.

        A column of a csv file is float64 if its first values are numbers, else text; `text_columns` always are text.
        """
        try:
            import pyarrow
            from pyarrow import dataset
        except ImportError:
            message = f"{key}={path}: needs pyarrow, which is not installed; type  pip install 'paceline[trees]'"
            raise UserError(message, code="not-installed") from None
        try:
            if kind in ("csv", "tsv"):
                schema = dataset.dataset(path, format=dataset.CsvFileFormat(*_csv_options(kind))).schema
                numeric = {item.name for item in schema if is_number(item.type)}.difference(text_columns)
                types = {name: pyarrow.float64() if name in numeric else pyarrow.string() for name in schema.names}
                opened = dataset.dataset(path, format=dataset.CsvFileFormat(*_csv_options(kind, types)))
            else:
                opened = dataset.dataset(path, format=kind)
        except (pyarrow.ArrowException, OSError) as error:
            before, _, reason = _first_line(error).rpartition("multiple columns named ")
            if before:
                raise invalid_data(f"{key}={path}: two columns are named {reason!r}; rename one", key) from None
            raise UserError(f"{key}={path}: cannot be read as {kind} ({reason})", code="unreadable", key=key) from None
        return cls(path, kind, opened)

    @property
    def columns(self) -> list[str]:
        return list(self.dataset.schema.names)

    def iter_batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        return self._iter_with_user_errors(lambda: self.dataset.to_batches(columns=list(columns), batch_size=rows))

    def iter_first(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Yield `rows` or a few more, without a scanner, which would read far ahead."""
        return self._iter_with_user_errors(
            lambda: [batch.slice(0, rows).select(list(columns)) for batch in self._read_first_batches(rows)]
        )

    def count_rows(self) -> float:
        """Return the number of rows, of a text file an estimate from its beginning."""
        if self.kind not in ("csv", "tsv"):
            return self.dataset.count_rows()
        text, scale = read_beginning(self.path, HEAD_BYTES)
        return max(1, text.count(b"\n") - 1) * scale

    def _iter_with_user_errors(self, batches: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        import pyarrow

        try:
            yield from (batch for batch in batches() if batch.num_rows)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self.path}: {_first_line(error)}", code="unreadable") from None

    def _read_first_batches(self, rows: int) -> Iterable[Any]:
        """Read the beginning of the file; a batch of Arrow IPC may have more than `rows`."""
        import pyarrow

        if self.kind in ("csv", "tsv"):
            from pyarrow import csv

            parse, _, convert = _csv_options(self.kind, self.dataset.schema)
            text = read_beginning(self.path, HEAD_BYTES)[0]
            lines = pyarrow.BufferReader(text[: text.rfind(b"\n") + 1] or text)
            return csv.read_csv(lines, None, parse, convert).slice(0, rows).combine_chunks().to_batches()
        if self.kind == "parquet":
            with open_parquet(self.path, streamed=True) as file:
                return list(itertools.islice(file.iter_batches(rows, use_threads=False), 1))
        with pyarrow.ipc.open_file(pyarrow.memory_map(str(self.path))) as file:
            return [file.get_batch(number) for number in range(min(1, file.num_record_batches))]


def is_number(kind: Any) -> bool:
    """Whether an Arrow type is numeric; a column of nulls is, too."""
    from pyarrow import types

    return any(test(kind) for test in (types.is_integer, types.is_floating, types.is_null, types.is_boolean))


def _csv_options(kind: str, types: Any = None) -> tuple[Any, None, Any]:
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter="\t" if kind == "tsv" else ",")
    return parse, None, csv.ConvertOptions(null_values=MISSING_VALUES, strings_can_be_null=True, column_types=types)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
