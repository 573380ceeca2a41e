"""Prepared tables: rows of 32-bit numbers on disk, read once and then mapped by every rank; and their targets.

Categories are numbered in alphabetical order, missing values are NaN. Rows are held out by their numbers.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.sections import TableData
from paceline.data.cache import (
    ArrayWriter,
    describe_array,
    map_array,
    open_entry,
    prepare_entry,
    read_facts,
    write_facts,
)
from paceline.data.files import check_file, invalid_data
from paceline.data.order import derive_key, mix
from paceline.data.table_encoder import SplitWriter, TableEncoder
from paceline.data.table_source import Column, TableSource, encode_words, open_tables, parse_cell
from paceline.data.tables import check_columns, format_label
from paceline.errors import InvalidValue, UserError, join_names, reject_value
from paceline.io.files import expand_cache, hash_value, validate_fields
from paceline.workload import LogFn, ignore_log

FACTS = "facts.json"
FORMAT = 3
COPIED_ROWS = 1 << 16
COUNTED_ROWS, MAX_BINS = 20_000, 256
PROBED_VALUES, MIN_PROBED_ROWS = 1_000_000, 100
"""What a plan reads of a long table: values, and rows however many columns they have."""
HELD_OUT, BINNED = 1, 2  # streams of random numbers
AMBIGUOUS_VALUES = 20  # different whole numbers of a label that may be classes as well as amounts
MAX_RELEVANCE = 31
MAX_WORDS, MAX_WORD_SHARE = 256, 0.1  # of a column, and of all rows: more are names of rows, or texts


class Task(Enum):
    BINARY = "binary"
    CLASSES = "multiclass"
    NUMBER = "regression"
    COUNT = "poisson"
    RANKING = "ranking"


@dataclass(frozen=True)
class Coding:
    columns: tuple[str, ...]
    categories: dict[str, list[str]]


@dataclass(frozen=True)
class TableFacts(Coding):
    classes: tuple[str, ...]
    values: tuple[float, ...]  # the different numbers of a label that holds few of them
    rows: int
    test_rows: int
    totals: dict[str, Any]
    """Sums over the labels: weights of each class, and of all; the weighted mean; the least label."""
    weighted: bool
    queries: int
    bins: int  # different values of all columns in the first rows, at most 256 of each
    gaps: bool
    digest: str


class RowSplit:
    """Rows X, labels y, weights, and the first row of each query, mapped."""

    def __init__(self, folder: Path, name: str, columns: int) -> None:
        self.X = map_array(folder / f"{name}.X.npy").reshape(-1, columns)
        self.y = map_array(folder / f"{name}.y.npy")
        files = [folder / f"{name}.{kind}.npy" for kind in ("w", "q")]
        self.weights, self.queries = (map_array(file) if file.exists() else None for file in files)

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class PreparedTable:
    folder: Path
    facts: TableFacts

    def split(self, name: str) -> RowSplit:
        return RowSplit(self.folder, name, len(self.facts.columns))

    def bin_rows(self) -> tuple[np.ndarray, np.ndarray | None]:
        split = self.split("bins" if (self.folder / "bins.X.npy").exists() else "train")
        return split.X, split.weights


def prepare_table(data: TableData, log: LogFn, verify: bool = True) -> PreparedTable:
    entry = expand_cache(data.cache) / "trees" / _name_of(data)

    def build(folder: Path) -> None:
        train, test = open_tables(data)
        log(f"reading {train.name}")
        _build_table(folder, data, train, test)

    return prepare_entry(entry, _open_table, build, log, verify)


def find_cached_table(data: TableData, whole: bool = True) -> PreparedTable | None:
    """Return the table if it is cached, else None. `whole` verifies its checksums."""
    try:
        entry = expand_cache(data.cache) / "trees" / _name_of(data)
    except UserError:
        return None
    return open_entry(entry, _open_table, verify=whole)


def probe_table(data: TableData) -> tuple[TableFacts, int]:
    """Return the facts of a table, and how many rows they are estimated from (0 where all were read)."""
    if (known := find_cached_table(data, whole=False)) is not None:
        return known.facts, 0
    train, test = open_tables(data, heads_only=True)
    if sum(table.rows() * len(table.columns) for table in (train, test) if table is not None) <= PROBED_VALUES:
        return prepare_table(data, ignore_log).facts, 0
    rows = max(MIN_PROBED_ROWS, min(COUNTED_ROWS, PROBED_VALUES // len(train.columns)))
    with tempfile.TemporaryDirectory() as folder:
        _build_table(Path(folder), data, replace(train, blocks=lambda: train.beginning(rows)), None)
        facts = parse_table_facts(read_facts(Path(folder) / FACTS))
    seen = facts.rows + facts.test_rows
    share = 1.0 if test is not None else facts.rows / seen
    return replace(facts, rows=max(seen, round(share * train.rows()))), seen


def _name_of(data: TableData) -> str:
    """Name a cache entry by the keys of the run file, and by size and date of the files."""
    unused = {"cache", "memory", "workers", "path", "test_path"}
    unused |= {"rows", "columns"} if data.path is not None else set()
    settings = {**data.model_dump(mode="json", exclude=unused), "format": FORMAT}
    files = {}
    for key in ("path", "test_path"):
        if (given := getattr(data, key)) is not None:
            path = check_file(given, f"data.{key}").resolve()
            files[key] = (str(path), path.stat().st_size, path.stat().st_mtime_ns)
    return hash_value([settings, files])[:24]


def _open_table(entry: Path, verify: bool) -> PreparedTable:
    return PreparedTable(entry, parse_table_facts(read_facts(entry / FACTS, verify)))


def parse_table_facts(values: Mapping[str, Any]) -> TableFacts:
    return TableFacts(**validate_fields(TableFacts, {key: value for key, value in values.items() if key != "files"}))


def draw_rows(numbers: np.ndarray, fraction: float, *key: int) -> np.ndarray:
    """Return which of these rows or queries a hash of their number and the key chooses."""
    return mix(numbers.astype(np.uint64) + derive_key(*key)) < np.uint64(fraction * (2**64 - 2**11))


def _build_table(folder: Path, data: TableData, train: TableSource, test: TableSource | None) -> None:
    encoder = _choose_columns(data, train)
    writers = {name: SplitWriter(folder, name, encoder) for name in ("train", "test")}
    seen = 0
    for rows in encoder.iter_encoded(train):
        numbers = np.arange(seen, seen + len(rows.y)) if rows.queries is None else rows.queries
        held = draw_rows(numbers, 0.0 if test is not None else data.test_fraction, HELD_OUT)
        writers["train"].add(rows.where(~held))
        writers["test"].add(rows.where(held))
        seen += len(rows.y)
    encoder.start_testing()
    if test is not None:
        for name in filter(None, (*encoder.names, encoder.label, encoder.weight, encoder.query)):
            check_columns({"data.test_path": name}, test.columns, test.name)
        seen = 0
        for rows in encoder.iter_encoded(test):
            writers["test"].add(rows)
            seen += len(rows.y)
    for writer in writers.values():
        writer.close()
    if len(writers["train"]) < 2:
        raise UserError(f"{train.name}: {len(writers['train'])} training rows; at least 2 are needed", key="data.path")
    for name in set(encoder.categories).difference(data.categories):
        if (count := len(encoder.known.get(name, ()))) > max(MAX_WORDS, MAX_WORD_SHARE * seen):
            hint = f"type  data.ignore=[{name}]  or, to keep it,  data.categories=[{name}]"
            raise invalid_data(f"{train.name}: {name!r} has {count:,} different words; {hint}", "data.ignore")
    first = np.array(RowSplit(folder, "train", len(encoder.names)).X[:COUNTED_ROWS])
    bins = sum(min(MAX_BINS, len(np.unique(column[~np.isnan(column)]))) for column in first.T)
    facts = encoder.facts(writers["train"], writers["test"]) | {"bins": bins, "gaps": bool(np.isnan(first).any())}
    _write_bins(folder, data, len(encoder.names), facts["rows"])
    files = {file.name: describe_array(file) for file in sorted(folder.glob("*.npy"))}  # as they are after renumbering
    write_facts(folder / FACTS, {**asdict(TableFacts(**facts)), "files": files})


def _choose_columns(data: TableData, source: TableSource) -> TableEncoder:
    npz = data.path is not None and data.path.suffix == ".npz"
    special = {"label": data.label, "weight": data.weight, "query": getattr(data, "query", None)}
    if npz:
        special |= {key: special[key] or key for key in ("weight", "query") if key in source.columns}
    given = [name for name in special.values() if name is not None]
    for what, name in special.items():
        if name in (*data.categories, *data.ignore) or given.count(name or "") > 1:
            raise UserError(f"data: column {name!r} is the {what}, and can be nothing else", key=f"data.{what}")
        if name is not None:
            check_columns({f"data.{what}": name}, source.columns, source.name)
    for name in data.categories:
        check_columns({"data.categories": name}, source.columns, source.name)
    for name in data.ignore if npz or data.path is None else ():
        check_columns({"data.ignore": name}, source.columns, source.name)
    names = [name for name in source.columns if name not in (*given, *data.ignore)]
    if not names:
        raise UserError(f"{source.name} has no column to learn from beside {data.label!r}", key="data.ignore")
    categories = [name for name in names if name in (*data.categories, *source.words)]
    return TableEncoder(names, data.label, categories, special["weight"], special["query"])


def _write_bins(folder: Path, data: TableData, columns: int, rows: int) -> None:
    most = getattr(data, "bin_rows", rows)
    if rows <= most:
        return
    for kind, width in (("X", columns), ("y", 1), ("w", 1)):
        if not (folder / f"train.{kind}.npy").exists():
            continue
        with ArrayWriter(folder / f"bins.{kind}.npy", np.float32) as writer:
            for first in range(0, rows, COPIED_ROWS):
                some = map_array(folder / f"train.{kind}.npy").reshape(rows, width)[first : first + COPIED_ROWS]
                numbers = np.arange(first, first + len(some))
                writer.append(some[draw_rows(numbers, most / rows, BINNED)].ravel())


def encode_rows(rows: Sequence[Mapping[str, Any]], coding: Coding) -> np.ndarray:
    """Encode new rows as those of the table were; a category that it did not have is missing."""
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise InvalidValue(f"{wrong[0]!r:.80} is not a row of {join_names(coding.columns, 12)}")
    known = dict.fromkeys(name for row in rows for name in row)
    for name in coding.columns:
        check_columns({"": name}, known, "the rows")
    block: dict[str, Column] = {}
    for name in coding.columns:
        values, words = [row.get(name) for row in rows], name in coding.categories
        block[name] = encode_words([*map(format_label, values)]) if words else _parse_cells(name, values)
    encoder = TableEncoder(list(coding.columns), "", list(coding.categories))
    encoder.known = {name: {word: code for code, word in enumerate(words)} for name, words in coding.categories.items()}
    encoder.start_testing()
    return encoder.encode_features("predict", block, 0)


def _parse_cells(name: str, values: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(values), np.float64)
    for number, value in enumerate(values):
        try:
            found[number] = parse_cell(value)
        except ValueError:
            raise InvalidValue(f"row {number + 1}: {name!r} is {value!r:.40}, not a number", key=name) from None
    return found


@dataclass(frozen=True)
class TableTarget:
    task: Task
    classes: tuple[str, ...]
    values: tuple[float, ...]

    @property
    def outputs(self) -> int:
        return len(self.classes) if self.task is Task.CLASSES else 1

    def labels(self, y: np.ndarray) -> np.ndarray:
        """Return labels for the libraries: classes are numbered from 0."""
        if not self.classes:
            return np.asarray(y)
        return np.searchsorted(np.array(self.values, y.dtype), y).astype(np.float32)


def describe_predicted(target: TableTarget, coding: Coding) -> dict[str, Any]:
    """Return what `parse_predicted` reads: the target and the columns that it is predicted from."""
    about = {"objective": target.task.value, "classes": target.classes, "values": target.values}
    return {**about, "columns": coding.columns, "categories": coding.categories}


def parse_predicted(about: Mapping[str, Any]) -> tuple[TableTarget, Coding]:
    facts = validate_fields(TableTarget, {name: about[name] for name in ("classes", "values")})
    coding = Coding(**validate_fields(Coding, {name: about[name] for name in ("columns", "categories")}))
    return TableTarget(Task(about["objective"]), **facts), coding


def choose_target(objective: str, task: Task | None, label: str, facts: TableFacts) -> TableTarget:
    """Return what is predicted; UserError if the labels do not fit the task that `model.objective` names."""
    task = task or _choose_task(facts)
    if task is None or (problem := _find_mismatch(task, label, facts)):
        if task is None:
            types = "type  model.objective=multiclass  or  model.objective=regression"
            problem = f"{label!r} may be classes or amounts ({_join_values(facts)}); {types}"
        raise reject_value("model.objective", objective, problem, "invalid-value")
    if task not in (Task.BINARY, Task.CLASSES):
        return TableTarget(task, (), ())
    return TableTarget(task, facts.classes or tuple(f"{value:g}" for value in facts.values), facts.values)


def _choose_task(facts: TableFacts) -> Task | None:
    """Return the task that fits the labels; None if they may be classes or amounts."""
    if facts.queries:
        return Task.RANKING
    if facts.classes or len(facts.values) == 2:
        return Task.BINARY if len(facts.values) == 2 else Task.CLASSES
    return None if 0 < len(facts.values) <= AMBIGUOUS_VALUES and _are_whole(facts) else Task.NUMBER


def _find_mismatch(task: Task, label: str, facts: TableFacts) -> str:
    """Return why the labels do not fit the task; "" if they do."""
    least, values, held = facts.totals["least"], facts.values, f"{label!r} holds {_join_values(facts)}"
    by_number = bool(values) and not facts.classes and _are_whole(facts)
    inside = by_number and 0 <= min(values) <= max(values) <= MAX_RELEVANCE
    sorts, ranks = task in (Task.BINARY, Task.CLASSES), task is Task.RANKING
    checks = (
        (ranks and not facts.queries, "it ranks rows within queries; name their column as  data.query=COLUMN"),
        (ranks and not inside, f"{held}; relevance is a whole number from 0 to {MAX_RELEVANCE}"),
        (not ranks and facts.queries, "with data.query use  model.objective=rank:ndcg"),
        (sorts and not values, f"{label!r} has over a thousand different numbers; use  model.objective=regression"),
        (sorts and not facts.classes and not by_number, f"{held}; use  model.objective=regression"),
        (
            task is Task.BINARY and len(values) != 2,
            f"{label!r} has {len(values)} classes; use  model.objective=multiclass",
        ),
        (not sorts and not ranks and facts.classes, f"{held}; use  model.objective=auto  for their classes"),
        (task is Task.COUNT and least < 0, f"{label!r} has {least:g}; counts are 0 or more"),
    )
    return next((problem for wrong, problem in checks if wrong), "")


def _are_whole(facts: TableFacts) -> bool:
    return all(float(value).is_integer() for value in facts.values)


def _join_values(facts: TableFacts) -> str:
    if facts.classes:
        return f"words ({join_names(facts.classes)})"
    return join_names([f"{value:g}" for value in facts.values or (facts.totals["least"], facts.totals["mean"])], 3)
