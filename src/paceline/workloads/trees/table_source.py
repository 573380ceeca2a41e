"""Open tables as blocks of columns: csv, Parquet, Arrow and .npz files, or a synthetic table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.files import check_file, read_beginning
from paceline.data.npz import open_npz, read_npz_heads
from paceline.data.order import derive_key, draw_fractions
from paceline.data.tables import open_parquet
from paceline.errors import UserError, did_you_mean, join_names
from paceline.workloads.trees.sections import TreesData

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "ipc",
    ".feather": "feather",
    ".npz": "npz",
}
MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"]
"""What a csv file has where a value is missing."""
BLOCK_ROWS = 1 << 16
HEAD_BYTES = 1 << 22
"""Of a table, or of each of its arrays, that who only looks reads."""
NPZ = ("X", "y", "weight", "query")
"""Arrays of an .npz file; those of the rows to test on are called X_test, y_test and so on."""


@dataclass(frozen=True)
class Words:
    """A column of names: their numbers, -1 where one is missing, and what each number stands for."""

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
    beginning: Callable[[int], Iterator[Block]]
    """The first rows, so many or a few more, with little else read."""
    rows: Callable[[], float]
    """How many there are; of a csv file about."""


def open_tables(data: TreesData, looking: bool = False) -> tuple[TableSource, TableSource | None]:
    """What to learn from and, where it is another table, what to test on. `looking`: of arrays the first rows alone."""
    if data.path is None:
        if data.test_path is not None:
            raise UserError(f"data.test_path={data.test_path}, but data.path is missing; give both, or neither")
        return _made_up(data), None
    path = check_file(data.path, "data.path")
    if _format_of(path, "data.path") == "npz":
        return _of_npz_heads(path) if looking else _of_npz(path)
    train = _of_arrow(path, "data.path", data)
    return train, None if data.test_path is None else _of_arrow(data.test_path, "data.test_path", data)


def _made_up(data: TreesData) -> TableSource:
    def beginning(rows: int) -> Iterator[Block]:
        for block in generate_table_blocks(min(rows, data.rows), data.columns):
            yield {name: encode_words(column) if column.dtype.kind == "U" else column for name, column in block.items()}

    columns = [*list_synthetic_columns(data.columns), LABEL]
    rows = data.rows
    return TableSource("the made-up table", columns, lambda: beginning(rows), beginning, lambda: rows)


def encode_words(values: Sequence[Any] | np.ndarray) -> Words:
    words, codes = np.unique(np.asarray(values, str), return_inverse=True)
    return Words(np.where(np.isin(words, MISSING)[codes], -1, codes), words.tolist())


def _format_of(path: Path, key: str) -> str:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if (kind := FORMATS.get(suffix.lower())) is None:
        raise UserError(f"{key}={path}: the name must end in one of {', '.join(FORMATS)}; .gz may follow .csv and .tsv")
    return kind


def _of_npz(path: Path) -> tuple[TableSource, TableSource | None]:
    with open_npz(path) as file:
        found = {name: file[name] for name in file.files}
    return _of_arrays(path, found)


def _of_npz_heads(path: Path) -> tuple[TableSource, TableSource | None]:
    """The same of their first rows; how many there are is known."""
    heads = read_npz_heads(path, HEAD_BYTES)
    found = {name: head.first for name, head in heads.items()}
    for name in {"X", "X_test"} & heads.keys():
        shape = heads[name].shape
        if len(shape) == 2 and not len(found[name]):  # it lies column by column: different numbers stand for them
            rows = min(shape[0], max(1, HEAD_BYTES // 8 // max(1, shape[1])))
            found[name] = np.arange(rows * shape[1], dtype=np.float32).reshape(rows, shape[1])
    for end in ("", "_test"):
        here = [key + end for key in NPZ if key + end in found]
        rows = min((len(found[name]) for name in here if heads[name].shape), default=0)
        found |= {name: found[name][:rows] for name in here}
    train, test = _of_arrays(path, found)
    sizes = [heads[name].shape[0] for name in ("X", "X_test") if name in heads]
    return replace(train, rows=lambda: sizes[0]), None if test is None else replace(test, rows=lambda: sizes[1])


def _of_arrays(path: Path, found: Mapping[str, np.ndarray]) -> tuple[TableSource, TableSource | None]:
    for name in ("X", "y"):
        if name not in found:
            there = join_names([*found], 12) or "nothing"
            raise UserError(f"data.path={path}: there is no array {name!r} (there: {there}); give X and y")
    names = [str(name) for name in found["names"]] if "names" in found else None
    train, test = ({key: found.get(f"{key}{end}") for key in NPZ} for end in ("", "_test"))
    return _arrays(str(path), train, "", names), _arrays(str(path), test, "_test", names) if "X_test" in found else None


def _arrays(path: str, given: Mapping[str, np.ndarray | None], end: str, names: list[str] | None) -> TableSource:
    """Arrays whose names in the file have this end."""
    X, y = given["X"], given["y"]
    assert X is not None
    if X.ndim != 2 or X.dtype.kind not in "biuf":
        raise UserError(f"{path}: X{end} is {X.dtype} of shape {list(X.shape)}; it must be numbers, rows × columns")
    if y is None:
        raise UserError(f"{path}: there is no array 'y{end}' beside X{end}")
    beside = {"label" if key == "y" else key: array for key, array in given.items() if key != "X" and array is not None}
    for key, array in beside.items():
        if array.shape != X.shape[:1]:
            called = "y" if key == "label" else key
            raise UserError(f"{path}: {called}{end} has shape {list(array.shape)}, and X{end} has {len(X)} rows")
    columns = names or [f"f{number}" for number in range(X.shape[1])]
    if len(columns) != X.shape[1]:
        raise UserError(f"{path}: there are {len(columns)} names for {X.shape[1]} columns of X{end}")

    def blocks() -> Iterator[Block]:
        for first in range(0, len(X), BLOCK_ROWS):
            some = slice(first, first + BLOCK_ROWS)
            block: dict[str, Column] = {c: X[some, j].astype(np.float32) for j, c in enumerate(columns)}
            for name, array in beside.items():
                block[name] = encode_words(array[some]) if array.dtype.kind in "US" else array[some].astype(np.float64)
            yield block

    return TableSource(path, [*columns, *beside], blocks, lambda rows: blocks(), lambda: len(X))


def _of_arrow(path: Path, key: str, data: TreesData) -> TableSource:
    try:
        import pyarrow
        import pyarrow.dataset
    except ImportError:
        raise UserError("workload=trees reads tables with pyarrow; type  pip install 'paceline[trees]'") from None
    path = check_file(path, key)
    kind = _format_of(path, key)
    if kind == "npz":
        raise UserError(
            f"{key}={path}: give the table as .csv or .parquet; an .npz file holds X_test and y_test itself"
        )
    try:
        opened = _dataset(path, kind, data)
    except (pyarrow.ArrowException, OSError) as error:
        _, named, twice = _first_line(error).rpartition("multiple columns named ")
        if named:
            raise UserError(f"{key}={path}: two columns are called {twice!r}; give each its own name") from None
        raise UserError(f"{key}={path}: cannot be read as {kind} ({_first_line(error)})") from None
    schema = opened.schema
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise UserError(f"{key}={path}: two columns are called {twice!r}; give each its own name")
    if key == "data.path":
        for name, given in ((data.label, "data.label"), *((name, "data.categories") for name in data.categories)):
            require_column(name, given, str(path), schema.names)
    _refuse_words(path, schema, data)
    wanted = [name for name in schema.names if name not in data.ignore]

    def read(batches: Callable[[], Iterable[Any]]) -> Iterator[Block]:
        try:
            for batch in batches():
                if batch.num_rows:
                    yield {name: _column(batch.column(name), name in data.categories) for name in wanted}
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: {_first_line(error)}") from None

    text = kind in ("csv", "tsv")
    return TableSource(
        str(path),
        wanted,
        lambda: read(lambda: opened.to_batches(columns=wanted, batch_size=BLOCK_ROWS)),
        lambda rows: read(
            lambda: [batch.slice(0, rows).select(wanted) for batch in _first_batches(path, kind, opened, rows)]
        ),
        lambda: _rows_in_text(path) if text else opened.count_rows(),
    )


def _dataset(path: Path, kind: str, data: TreesData) -> Any:
    import pyarrow
    from pyarrow import dataset

    if kind not in ("csv", "tsv"):
        return dataset.dataset(path, format=kind)
    found = dataset.dataset(path, format=dataset.CsvFileFormat(*_text_options(kind))).schema
    types = {
        item.name: pyarrow.string() if item.name in data.categories or not _is_number(item.type) else pyarrow.float64()
        for item in found
    }
    return dataset.dataset(path, format=dataset.CsvFileFormat(*_text_options(kind, types)))


def _text_options(kind: str, types: Any = None) -> tuple[Any, None, Any]:
    """How texts are parsed; nothing of how they are read; and what their fields become."""
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter="\t" if kind == "tsv" else ",")
    return parse, None, csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True, column_types=types)


def _first_batches(path: Path, kind: str, opened: Any, rows: int) -> Iterable[Any]:
    """Of a file that is not read any further: a scanner would run far ahead."""
    import pyarrow

    if kind in ("csv", "tsv"):
        from pyarrow import csv

        parse, _, convert = _text_options(kind, opened.schema)
        text = read_beginning(path, HEAD_BYTES)[0]
        lines = text[: text.rfind(b"\n") + 1] or text
        return (
            csv.read_csv(pyarrow.BufferReader(lines), None, parse, convert).slice(0, rows).combine_chunks().to_batches()
        )
    if kind == "parquet":
        with open_parquet(path, streamed=True) as file:
            return list(itertools.islice(file.iter_batches(rows, use_threads=False), 1))
    with pyarrow.ipc.open_file(pyarrow.memory_map(str(path))) as file:
        return [file.get_batch(number) for number in range(min(1, file.num_record_batches))]


def _rows_in_text(path: Path) -> float:
    text, more = read_beginning(path, HEAD_BYTES)
    return max(1, text.count(b"\n") - 1) * more


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return any(asked(kind) for asked in (types.is_integer, types.is_floating, types.is_null, types.is_boolean))


def _refuse_words(path: Path, schema: Any, data: TreesData) -> None:
    known = (*data.categories, *data.ignore, data.label, data.query, data.weight)
    others = [item.name for item in schema if not _is_number(item.type) and item.name not in known]
    if others:
        said = f"{path}: {join_names(others)} hold{'s' * (len(others) == 1)} words, and trees compare numbers"
        raise UserError(f"{said}; type  data.categories=[{','.join([*data.categories, *others])}]  or  data.ignore=…")


def _column(array: Any, category: bool) -> Column:
    import pyarrow
    import pyarrow.compute

    if not category and _is_number(array.type):
        return array.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    if pyarrow.types.is_floating(array.type):  # 3 means the same in every kind of file
        array = pyarrow.array([None if v is None or v != v else f"{v:g}" for v in array.to_pylist()], pyarrow.string())
    if not pyarrow.types.is_dictionary(array.type):
        array = array.cast(pyarrow.string()).dictionary_encode()
    words = array.dictionary.cast(pyarrow.string()).to_pylist()
    codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return Words(codes, [str(word).strip() for word in words])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def require_column(name: str, key: str, where: str, there: Sequence[str]) -> None:
    """A column that must be there."""
    if name not in there:
        told = f"{did_you_mean(name, there)} (there: {join_names(there, 12)})"
        raise UserError(f"{key}={name}: {where} has no such column{told}")


COLOURS = ("amber", "blue", "green", "red", "violet")
GAPS = 0.05
"""Of the values of one column that are missing."""
BLOCK = 1 << 16
LABEL, CATEGORY = "label", "colour"


def list_synthetic_columns(columns: int) -> list[str]:
    return [CATEGORY, *(f"x{number}" for number in range(1, columns))]


def generate_table_blocks(rows: int, columns: int) -> Iterator[dict[str, np.ndarray]]:
    """The table block by block, each column by its name."""
    for first in range(0, rows, BLOCK):
        count = min(BLOCK, rows - first)
        drawn = {
            name: draw_fractions(derive_key(number), first, count)
            for number, name in enumerate(list_synthetic_columns(columns))
        }
        colour = (drawn[CATEGORY] * len(COLOURS)).astype(np.int64)
        x1, x2, x3 = (drawn[f"x{number}"] for number in (1, 2, 3))
        odds = 6 * (x1 - 0.5) * (colour != 1) + 4 * np.sin(6 * x2) + 3 * (x3 > 0.7) * (colour == 3) - 1
        found: dict[str, np.ndarray] = {
            name: drawn[name].astype(np.float32) for name in list_synthetic_columns(columns)
        }
        found["x2"][draw_fractions(derive_key(-1), first, count) < GAPS] = np.nan
        found[CATEGORY] = np.array(COLOURS)[colour]
        found[LABEL] = np.array(["no", "yes"])[
            (draw_fractions(derive_key(-2), first, count) < 1 / (1 + np.exp(-odds))) * 1
        ]
        yield found
