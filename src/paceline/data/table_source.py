"""Open tables as blocks of columns: csv, Parquet, Arrow and .npz files, or a synthetic table."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.sections import TableData
from paceline.data.arrow_tables import (
    ARROW_KINDS,
    HEAD_BYTES,
    MISSING_VALUES,
    ArrowTable,
    convert_numbers,
    parse_number,
)
from paceline.data.files import check_file, invalid_data
from paceline.data.npz import open_npz, read_npz_heads
from paceline.data.order import derive_key, draw_fractions
from paceline.data.tables import check_columns, format_label
from paceline.errors import UserError

KINDS = {**ARROW_KINDS, ".npz": "npz"}
BLOCK_ROWS = 1 << 16
ARRAYS = ("X", "y", "weight", "query")  # arrays of an .npz file; those of test rows are called X_test, y_test and so on
COLOURS = ("amber", "blue", "green", "red", "violet")
LABEL, CATEGORY = "label", "colour"
MISSING_SHARE = 0.05


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
            raise UserError(f"data.test_path={data.test_path} needs data.path", code="missing-value", key="data.path")
        return _open_synthetic(data), None
    path, kind = _check_table(data.path, "data.path")
    if kind == "npz":
        if heads_only:
            return _open_npz_heads(path)
        with open_npz(path) as file:
            return _open_arrays(path, {name: file[name] for name in file.files})
    train = _open_arrow(path, kind, "data.path", data, heads_only)
    if data.test_path is None:
        return train, None
    path, kind = _check_table(data.test_path, "data.test_path")
    if kind == "npz":
        message = f"data.test_path={path}: give a .csv or .parquet file, or X_test and y_test in data.path"
        raise UserError(message, code="invalid-format", key="data.test_path")
    return train, _open_arrow(path, kind, "data.test_path", data, heads_only, train.words)


def _check_table(path: Path, key: str) -> tuple[Path, str]:
    path = check_file(path, key)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if (kind := KINDS.get(suffix.lower())) is None:
        message = f"{key}={path}: the name must end in one of {', '.join(KINDS)}; .gz may follow .csv and .tsv"
        raise UserError(message, code="invalid-format", key=key)
    return path, kind


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
    """Make a table of arrays whose names in the file have this end."""

    def reject(problem: str) -> UserError:
        return invalid_data(f"data.path={path}: {problem}", "data.path")

    X, y = given["X"], given["y"]
    if X is None or y is None:
        raise reject(f"array {'X' if X is None else 'y'}{end} is missing; give X and y")
    if X.ndim != 2 or X.dtype.kind not in "biuf":
        raise reject(f"X{end} is {X.dtype} of shape {list(X.shape)}; it must be numbers, rows × columns")
    beside = {"label" if key == "y" else key: array for key, array in given.items() if key != "X" and array is not None}
    for key, array in beside.items():
        if array.shape != X.shape[:1]:
            name = "y" if key == "label" else key
            raise reject(f"{name}{end} has shape {list(array.shape)}, and X{end} has {len(X)} rows")
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
            check_columns({option: name}, table.columns, path)
    columns = [name for name in table.columns if name not in data.ignore]
    if words is None:
        kinds = table.find_kinds(columns, heads_only)
        named = {name for name in kinds if name == data.label and kinds[name] == "bools"} | set(data.categories)
        words = named | {name for name, found in kinds.items() if found == "words"}

    def decode(batches: Iterable[Any]) -> Iterator[Block]:
        seen = 0
        for batch in batches:
            yield {name: _decode_column(batch.column(name), name, name in words, f"{path}", seen) for name in columns}
            seen += batch.num_rows

    return TableSource(
        str(path),
        columns,
        lambda: decode(table.iter_batches(columns, BLOCK_ROWS)),
        lambda rows: decode(table.iter_first(columns, rows)),
        table.count_rows,
        words,
    )


def _decode_column(array: Any, name: str, words: bool, source: str, seen: int) -> Column:
    if words:
        if not hasattr(array, "dictionary"):
            array = array.dictionary_encode()
        codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        found = encode_words([*map(format_label, array.dictionary.to_pylist()), ""])
        return Words(found.codes[codes], found.words)
    if (numbers := convert_numbers(array)) is None:
        for row, value in enumerate(array.to_pylist(), seen + 1):
            try:
                parse_number(value)
            except ValueError:
                raise invalid_data(f"{source} row {row}: {name!r} is {value!r:.40}, expected a number", name) from None
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
