"""Open tables as blocks of columns: csv, Parquet, Arrow and .npz files, or a synthetic table.

Text and Arrow files are read as record batches by pyarrow, which is imported when one is opened.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.sections import TableData
from paceline.data.files import invalid_data, read_beginning
from paceline.data.npz import open_npz, read_npz_heads
from paceline.data.order import derive_key, draw_fractions
from paceline.data.tables import check_columns, check_table, format_label, open_parquet
from paceline.errors import UserError, get_first_line, missing_value, not_installed, reject_value

KINDS = {f".{kind}": kind for kind in ("csv", "tsv", "parquet", "feather", "npz")} | {".pq": "parquet", ".arrow": "ipc"}
BLOCK_ROWS = 1 << 16
ARRAYS = ("X", "y", "weight", "query")  # arrays of an .npz file; those of test rows are called X_test, y_test and so on
COLOURS = ("amber", "blue", "green", "red", "violet")
LABEL, CATEGORY = "label", "colour"
MISSING_SHARE = 0.05
MISSING_VALUES = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"]
"""Fields of a csv file that are read as null."""
HEAD_BYTES = 1 << 22
INFERRED_ROWS = 1 << 16
TRUTHS = ["True", "true", "TRUE", "False", "false", "FALSE"]
DAY_S = 86_400


@dataclass(frozen=True)
class Words:
    """A column of categories: their numbers, -1 where one is missing, and the name of each number."""

    codes: np.ndarray
    words: Sequence[str]

    def __len__(self) -> int:
        return len(self.codes)


Column = np.ndarray | Words
Block = Mapping[str, Column]


@dataclass(frozen=True)
class TableSource:
    """A table that can be read from its beginning, any number of times."""

    name: str
    columns: Sequence[str]
    blocks: Callable[[], Iterator[Block]]
    beginning: Callable[[int], Iterator[Block]]  # yield the first rows, or a few more, reading little else
    rows: Callable[[], float]
    words: Collection[str] = ()  # columns of words; they are categories


def open_tables(data: TableData, heads_only: bool = False) -> tuple[TableSource, TableSource | None]:
    """Return the training table, and the test table if there is one. `heads_only`: only the first rows of arrays."""
    if data.path is None:
        if data.test_path is not None:
            raise missing_value("data.path", f"data.test_path={data.test_path} needs it")
        return _open_synthetic(data), None
    path, kind = check_table(data.path, "data.path", KINDS)
    if kind == "npz":
        if heads_only:
            return _open_npz_heads(path)
        with open_npz(path) as file:
            return _open_arrays(path, {name: file[name] for name in file.files})
    train = _open_arrow(path, kind, "data.path", data, heads_only)
    if data.test_path is None:
        return train, None
    others = {end: kind for end, kind in KINDS.items() if kind != "npz"}  # arrays of test rows are in the first file
    path, kind = check_table(data.test_path, "data.test_path", others)
    return train, _open_arrow(path, kind, "data.test_path", data, heads_only, train.words)


def encode_words(values: Sequence[Any] | np.ndarray) -> Words:
    words, codes = np.unique(np.asarray(values, str), return_inverse=True)
    known = ~np.isin(words, MISSING_VALUES)
    return Words(np.where(known, np.cumsum(known) - 1, -1)[codes], words[known].tolist())


def _open_npz_heads(path: Path) -> tuple[TableSource, TableSource | None]:
    heads = read_npz_heads(path, HEAD_BYTES)
    found = {name: head.first for name, head in heads.items()}
    for name in {"X", "X_test"} & heads.keys():
        shape = heads[name].shape
        if len(shape) == 2 and not len(found[name]):  # stored by columns: take numbers that all differ instead
            rows = min(shape[0], max(1, HEAD_BYTES // 8 // max(1, shape[1])))
            found[name] = np.arange(rows * shape[1], dtype=np.float32).reshape(rows, shape[1])
    for end in ("", "_test"):
        here = [key + end for key in ARRAYS if key + end in found]
        rows = min((len(found[name]) for name in here if heads[name].shape), default=0)
        found |= {name: found[name][:rows] for name in here}
    train, test = _open_arrays(path, found)
    sizes = [heads[name].shape[0] for name in ("X", "X_test") if name in heads]
    return replace(train, rows=lambda: sizes[0]), None if test is None else replace(test, rows=lambda: sizes[1])


def _open_arrays(path: Path, found: Mapping[str, np.ndarray]) -> tuple[TableSource, TableSource | None]:
    names = [str(name) for name in found["names"]] if "names" in found else None
    train, test = ({key: found.get(f"{key}{end}") for key in ARRAYS} for end in ("", "_test"))
    return _from_arrays(path, train, "", names), _from_arrays(path, test, "_test", names) if "X_test" in found else None


def _from_arrays(path: Path, given: Mapping[str, np.ndarray | None], end: str, names: list[str] | None) -> TableSource:
    """Return a table of X, y and weights, whose names in the file have this end; raise UserError if they do not fit."""

    def reject(problem: str) -> UserError:
        return invalid_data(f"data.path={path}: {problem}", "data.path")

    beside = {key: array for key, array in given.items() if array is not None}
    if missing := [key for key in ("X", "y") if key not in beside]:
        raise reject(f"array {missing[0]}{end} is missing; give X and y")
    X = beside.pop("X")
    if X.ndim != 2 or X.dtype.kind not in "biuf":
        raise reject(f"X{end} is {X.dtype} of shape {list(X.shape)}; it must be numbers, rows × columns")
    for key, array in beside.items():
        if array.shape != X.shape[:1]:
            raise reject(f"{key}{end} has shape {list(array.shape)}, and X{end} has {len(X)} rows")
    beside = {"label": beside.pop("y"), **beside}
    columns = names or [f"f{number}" for number in range(X.shape[1])]
    if len(columns) != X.shape[1]:
        raise reject(f"there are {len(columns)} names for {X.shape[1]} columns of X{end}")

    def blocks() -> Iterator[Block]:
        for first in range(0, len(X), BLOCK_ROWS):
            some = slice(first, first + BLOCK_ROWS)
            block: dict[str, Column] = {c: X[some, j].astype(np.float32) for j, c in enumerate(columns)}
            for name, array in beside.items():
                block[name] = encode_words(array[some]) if array.dtype.kind in "US" else array[some].astype(np.float64)
            yield block

    return TableSource(str(path), [*columns, *beside], blocks, lambda rows: blocks(), lambda: len(X))


def _open_arrow(
    path: Path, kind: str, key: str, data: TableData, heads_only: bool, words: Collection[str] | None = None
) -> TableSource:
    """Open a file; `words` are the columns of words of the training table, which those of a test table follow."""
    table = ArrowTable.open(path, kind, key)
    if words is None:
        for option, name in (("data.label", data.label), *(("data.categories", name) for name in data.categories)):
            check_columns({option: name}, table.dataset.schema.names, path)
    columns = [name for name in table.dataset.schema.names if name not in data.ignore]
    if words is None:
        kinds = table.find_kinds(columns, heads_only)
        named = {name for name in kinds if name == data.label and kinds[name] == "bools"} | set(data.categories)
        words = named | {name for name, found in kinds.items() if found == "words"}

    def decode(batches: Iterable[Any]) -> Iterator[Block]:
        for batch in batches:
            yield {name: _decode_column(batch.column(name), name, name in words, path) for name in columns}

    return TableSource(
        str(path),
        columns,
        lambda: decode(table.iter_batches(columns, BLOCK_ROWS)),
        lambda rows: decode(table.iter_first(columns, rows)),
        table.count_rows,
        words,
    )


def _decode_column(array: Any, name: str, words: bool, path: Path) -> Column:
    if words:
        if not hasattr(array, "dictionary"):
            array = array.dictionary_encode()
        codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        found = encode_words([*map(format_label, array.dictionary.to_pylist()), ""])
        return Words(found.codes[codes], found.words)
    if (numbers := convert_numbers(array)) is None:
        raise invalid_data(f"{path}: {name!r} has words, expected numbers alone", name)
    return numbers


def _open_synthetic(data: TableData) -> TableSource:
    names = [CATEGORY, *(f"x{number}" for number in range(1, data.columns))]

    def beginning(rows: int) -> Iterator[Block]:
        return _generate_blocks(min(rows, data.rows), names)

    whole = partial(beginning, data.rows)
    names = [*names, LABEL]
    return TableSource("the synthetic table", names, whole, beginning, lambda: float(data.rows), [CATEGORY, LABEL])


def _generate_blocks(rows: int, names: Sequence[str]) -> Iterator[Block]:
    """Yield numbers, categories and gaps, and a label that depends on some of them. Row i is always the same."""
    for first in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - first)
        drawn = {name: draw_fractions(derive_key(number), first, count) for number, name in enumerate(names)}
        colour = (drawn[CATEGORY] * len(COLOURS)).astype(np.int64)
        x1, x2, x3 = (drawn[f"x{number}"] for number in (1, 2, 3))
        odds = 6 * (x1 - 0.5) * (colour != 1) + 4 * np.sin(6 * x2) + 3 * (x3 > 0.7) * (colour == 3) - 1
        block: dict[str, Column] = {name: drawn[name].astype(np.float32) for name in names}
        missing = draw_fractions(derive_key(-1), first, count) < MISSING_SHARE
        block["x2"] = np.where(missing, np.float32(np.nan), drawn["x2"].astype(np.float32))
        block[CATEGORY] = encode_words(np.array(COLOURS)[colour])
        positive = draw_fractions(derive_key(-2), first, count) < 1 / (1 + np.exp(-odds))
        block[LABEL] = encode_words(np.array(["no", "yes"])[positive * 1])
        yield block


@dataclass(frozen=True)
class ArrowTable:
    """A file that can be scanned from its beginning any number of times."""

    path: Path
    kind: str
    dataset: Any

    @classmethod
    def open(cls, path: Path, kind: str, key: str) -> "ArrowTable":
        """Open a file of one of KINDS but npz; `key` is the field of the run file that named it.

        All columns of a csv file are text; `find_kinds` says what they hold.
        """
        try:
            import pyarrow
            from pyarrow import dataset
        except ImportError:
            raise not_installed(f"{key}={path}", "pyarrow", "paceline[trees]") from None
        try:
            if kind in ("csv", "tsv"):
                names = dataset.dataset(path, format=dataset.CsvFileFormat(*_build_csv_options(kind))).schema.names
                types = dict.fromkeys(names, pyarrow.string())
                opened = dataset.dataset(path, format=dataset.CsvFileFormat(*_build_csv_options(kind, types)))
            else:
                opened = dataset.dataset(path, format=kind)
        except (pyarrow.ArrowException, OSError) as error:
            raise reject_value(key, path, f"cannot be read as {kind} ({get_first_line(error)})", "unreadable") from None
        return cls(path, kind, opened)

    def iter_batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        with _translate_arrow_errors(self.path):
            yield from filter(len, self.dataset.to_batches(columns=list(columns), batch_size=rows))

    def iter_first(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Yield `rows` or a few more, without a scanner, which would read far ahead."""
        with _translate_arrow_errors(self.path):
            yield from (some.slice(0, rows).select(list(columns)) for some in filter(len, self._read_first(rows)))

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
                    column = clean_text_column(batch.column(name))
                    found[name] = [kind for kind in found[name] if kind == "words" or convert_text(column, kind)]
        if others := [name for name in names if not found[name]]:
            held = f"{others[0]!r} holds {types[others[0]]}"
            raise invalid_data(f"{self.path}: {held}; type  data.ignore=[{others[0]}]", "data.ignore")
        return {name: kinds[0] for name, kinds in found.items()}

    def count_rows(self) -> float:
        """Return the number of rows, of a text file an estimate from its beginning."""
        if self.kind not in ("csv", "tsv"):
            return self.dataset.count_rows()
        text, scale = read_beginning(self.path, HEAD_BYTES)
        return max(1, text.count(b"\n") - 1) * scale

    def _read_first(self, rows: int) -> Iterable[Any]:
        """Read the beginning of the file; a batch of Arrow IPC may have more than `rows`."""
        import pyarrow

        if self.kind in ("csv", "tsv"):
            from pyarrow import csv

            parse, _, convert = _build_csv_options(self.kind, self.dataset.schema)
            text = read_beginning(self.path, HEAD_BYTES)[0]
            lines = pyarrow.BufferReader(text[: text.rfind(b"\n") + 1] or text)
            return csv.read_csv(lines, None, parse, convert).slice(0, rows).combine_chunks().to_batches()
        if self.kind == "parquet":
            with open_parquet(self.path, streamed=True) as file:
                return list(itertools.islice(file.iter_batches(rows, use_threads=False), 1))
        with pyarrow.ipc.open_file(pyarrow.memory_map(str(self.path))) as file:
            return [file.get_batch(number) for number in range(min(1, file.num_record_batches))]


@contextmanager
def _translate_arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: {get_first_line(error)}", code="unreadable") from None


def _kinds_of_type(kind: Any) -> list[str]:
    """Return what a column of this Arrow type may hold, most special first."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    numbers = (types.is_integer, types.is_floating, types.is_null, types.is_decimal, types.is_duration)
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view)):
        return ["numbers", "bools", "dates", "words"]
    tests = {"numbers": numbers, "bools": [types.is_boolean], "dates": [types.is_date, types.is_timestamp]}
    return [name for name, known in tests.items() if any(test(kind) for test in known)]


def clean_text_column(column: Any) -> Any:
    """Return a column of text with blanks trimmed, and null for the ways of writing that a value is missing."""
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
        text = clean_text_column(column)
        column = next((found for kind in kinds[:-1] if (found := convert_text(text, kind)) is not None), None)
    if column is None:
        return None
    if _kinds_of_type(column.type) == ["dates"]:
        stamps = column.cast(pyarrow.timestamp("us", getattr(column.type, "tz", None)), safe=False)
        return stamps.cast(pyarrow.int64()).to_numpy(zero_copy_only=False) / (DAY_S * 1e6)
    if pyarrow.types.is_duration(column.type):
        column = column.cast(pyarrow.int64())
    return column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)


def parse_cell(value: Any) -> float:
    """Return one value as `convert_numbers` does; raise ValueError for a word."""
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


def _build_csv_options(kind: str, types: Any = None) -> tuple[Any, None, Any]:
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter="\t" if kind == "tsv" else ",")
    return parse, None, csv.ConvertOptions(null_values=MISSING_VALUES, strings_can_be_null=True, column_types=types)
