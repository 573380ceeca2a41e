"""Read tables as Arrow record batches: csv, tsv (gzip or not), Parquet, Arrow IPC and Feather. Needs pyarrow."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.data.files import invalid_data, read_beginning
from paceline.data.tables import open_parquet
from paceline.errors import UserError, get_first_line

ARROW_KINDS = {f".{kind}": kind for kind in ("csv", "tsv", "parquet", "feather")} | {".pq": "parquet", ".arrow": "ipc"}
MISSING_VALUES = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"]
"""Fields of a csv file that are read as null."""
HEAD_BYTES = 1 << 22
INFERRED_ROWS = 1 << 16
TRUTHS = ["True", "true", "TRUE", "False", "false", "FALSE"]
DAY_S = 86_400


@dataclass(frozen=True)
class ArrowTable:
    """A file that can be scanned from its beginning any number of times."""

    path: Path
    kind: str
    dataset: Any

    @classmethod
    def open(cls, path: Path, kind: str, key: str) -> "ArrowTable":
        """Open a file of one of ARROW_KINDS; `key` is the field of the run file that named it.

        All columns of a csv file are text; `find_kinds` says what they hold.
        """
        try:
            import pyarrow
            from pyarrow import dataset
        except ImportError:
            message = f"{key}={path}: needs pyarrow, which is not installed; type  pip install 'paceline[trees]'"
            raise UserError(message, code="not-installed") from None
        try:
            if kind in ("csv", "tsv"):
                names = dataset.dataset(path, format=dataset.CsvFileFormat(*_csv_options(kind))).schema.names
                types = dict.fromkeys(names, pyarrow.string())
                opened = dataset.dataset(path, format=dataset.CsvFileFormat(*_csv_options(kind, types)))
            else:
                opened = dataset.dataset(path, format=kind)
        except (pyarrow.ArrowException, OSError) as error:
            before, _, reason = get_first_line(error).rpartition("multiple columns named ")
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

    def find_kinds(self, names: Sequence[str], heads_only: bool = False) -> dict[str, str]:
        """Return whether columns hold "numbers", "bools", "dates" or "words": by their types or, of text, the first of
        these that all values are. `heads_only`: that the first ones are.
        """
        types = {name: self.dataset.schema.field(name).type for name in names}
        found = {name: _kinds_of_type(kind) for name, kind in types.items()}
        if texts := [name for name in names if len(found[name]) > 1]:
            rows = INFERRED_ROWS
            for batch in self.iter_first(texts, rows) if heads_only else self.iter_batches(texts, rows):
                for name in texts:
                    column = clean_text(batch.column(name))
                    found[name] = [kind for kind in found[name] if kind == "words" or convert_text(column, kind)]
        if others := [name for name in names if not found[name]]:
            message = f"{self.path}: {others[0]!r} holds {types[others[0]]}; leave it out as  data.ignore=[{others[0]}]"
            raise invalid_data(message, "data.ignore")
        return {name: kinds[0] for name, kinds in found.items()}

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
            raise UserError(f"{self.path}: {get_first_line(error)}", code="unreadable") from None

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


def _kinds_of_type(kind: Any) -> list[str]:
    """Return what a column of this Arrow type may hold, most special first."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    numbers = (types.is_integer, types.is_floating, types.is_null, types.is_decimal, types.is_duration)
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view)):
        return ["numbers", "bools", "dates", "words"]
    tests = {"numbers": numbers, "bools": [types.is_boolean], "dates": [types.is_date, types.is_timestamp]}
    return [name for name, known in tests.items() if any(test(kind) for test in known)]


def clean_text(column: Any) -> Any:
    """Return a column of text without blanks around it, and null where it says that a value is missing."""
    import pyarrow
    import pyarrow.compute as pc

    column = pc.utf8_trim_whitespace(column.cast(pyarrow.string()))
    return pc.if_else(pc.is_in(column, pyarrow.array(MISSING_VALUES)), None, column)


def convert_text(column: Any, kind: str) -> Any:
    """Return clean text as float64 (true is 1, a date counts days from 1970), or None if a value is of another kind."""
    import pyarrow
    import pyarrow.compute as pc

    if kind == "bools":
        truths = pc.is_in(column, pyarrow.array(TRUTHS))
        known = pc.all(pc.or_(truths, column.is_null())).as_py() is not False
        return pc.if_else(column.is_null(), None, pc.is_in(column, pyarrow.array(TRUTHS[:3]))) if known else None
    zones = (None, "UTC") if kind == "dates" else ()
    for target in [pyarrow.timestamp("us", zone) for zone in zones] or [pyarrow.float64()]:
        with suppress(pyarrow.ArrowInvalid):
            return column.cast(target)
    return None


def convert_numbers(column: Any) -> Any:
    """Return a column as a float64 array (true is 1, a date counts days from 1970); None if a value is a word."""
    import pyarrow

    if len(kinds := _kinds_of_type(column.type)) > 1:
        text = clean_text(column)
        column = next((found for kind in kinds[:-1] if (found := convert_text(text, kind)) is not None), None)
    if column is None:
        return None
    if _kinds_of_type(column.type) == ["dates"]:
        stamps = column.cast(pyarrow.timestamp("us", getattr(column.type, "tz", None)), safe=False)
        return stamps.cast(pyarrow.int64()).to_numpy(zero_copy_only=False) / (DAY_S * 1e6)
    if pyarrow.types.is_duration(column.type):
        column = column.cast(pyarrow.int64())
    return column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)


def parse_number(value: Any) -> float:
    """Return one value as `convert_numbers` does; ValueError if it is a word."""
    text = "" if value is None else str(value).strip()
    if text in MISSING_VALUES:
        return math.nan
    if text in TRUTHS:
        return float(text in TRUTHS[:3])
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() / DAY_S


def _csv_options(kind: str, types: Any = None) -> tuple[Any, None, Any]:
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter="\t" if kind == "tsv" else ",")
    return parse, None, csv.ConvertOptions(null_values=MISSING_VALUES, strings_can_be_null=True, column_types=types)
