"""Corpora for classifiers: labelled texts, those of AG News too, tokenised once into memory-mapped arrays.

The streams of a source can be started again, so that no stage has to keep the texts in memory.
"""

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.cache import ArrayWriter, DamagedEntry, map_array
from paceline.data.corpora import docstrings
from paceline.data.corpora.tokenised import SPLITS, BuiltCorpus, HashRange, Ids, TokenisedCorpus, limit_rate
from paceline.data.corpora.tokenizer import MASK, ChosenTokenizer, encode_texts, group_texts, load_tokenizer
from paceline.data.files import (
    check_file,
    hash_files_cached,
    hash_text,
    invalid_data,
    invalid_format,
)
from paceline.data.tables import iter_columns, locate_row, open_csv
from paceline.errors import did_you_mean, missing_value, reject_value
from paceline.io.files import expand_cache, hash_value
from paceline.workload import LogFn

MAX_CLASSES = 10_000  # more distinct labels than this are an identifier or a measurement
WHOLE_NUMBER = re.compile(r"[+-]?\d+")

Sample = tuple[str, int]
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
COLUMNS = ("class", "title", "description")
TRAIN_NAMES = ("train.csv", "train.csv.gz", "train_subset.csv", "train_subset.csv.gz")
TEST_NAMES = ("test.csv", "test.csv.gz")
CLEANING = 1  # raise it when `clean` changes the texts: cached corpora are named by it

EXPECTED = "type  data.path=FOLDER  with train.csv and test.csv (or .csv.gz), rows of class 1-4, title, description"

# The publication dropped the '&' of many entities: "Ravens #39; Reed", "a quot;crescent quot;".
DROPPED_AMPERSAND = re.compile(r"(?<![&\w])(#\d{2,5}|quot|amp|lt|gt|nbsp|hellip|[lr]squo|[lr]dquo|[mn]dash);")
SPACE_BEFORE_APOSTROPHE = re.compile(r"(?<=\w) (?=&#39;(?:s|t|d|m|re|ve|ll)\b)")


@dataclass(frozen=True)
class LabelledSource:
    """Labelled texts in two splits. `train()` and `test()` start a new stream; `fingerprint()` hashes the content."""

    train: Callable[[], Iterator[Sample]]
    test: Callable[[], Iterator[Sample]]
    fingerprint: Callable[[], str]
    classes: Callable[[], tuple[str, ...]]


def open_source(data: Any, looking: bool = False) -> LabelledSource:
    """Open the texts of `data.source`. `looking`: raise UserError rather than read much to hash it."""
    source = {"docstrings": _open_docstrings, "ag_news": _open_ag_news}.get(data.source, _open_table)(data, looking)
    return replace(source, train=lambda: islice(source.train(), data.limit or None))


def _open_docstrings(data: Any, looking: bool) -> LabelledSource:
    _reject_keys(data, "path", "test_path")
    splits = cache(lambda: docstrings.extract_samples(data.test_fraction, docstrings.mask_names))

    def fingerprint() -> str:
        return _fingerprint_source(data, docstrings.list_source_versions(), test_fraction=data.test_fraction)

    classes = docstrings.CLASSES
    return LabelledSource(lambda: iter(splits()[0]), lambda: iter(splits()[1]), fingerprint, lambda: classes)


def _open_ag_news(data: Any, looking: bool) -> LabelledSource:
    _reject_keys(data, "test_path")
    train, test = find_ag_news_files(data.path)

    def fingerprint() -> str:
        content = hash_files_cached([train, test], expand_cache(data.cache), looking)
        return _fingerprint_source(data, content, classes=TOPICS, cleaning=CLEANING)

    return LabelledSource(lambda: iter_ag_news(train), lambda: iter_ag_news(test), fingerprint, lambda: TOPICS)


@dataclass(frozen=True)
class LabelledTable:
    path: Path
    kind: str
    text: str
    label: str

    def rows(self) -> Iterator[tuple[int, str, str]]:
        wanted = {"data.text": self.text, "data.label": self.label}
        for number, (text, label) in iter_columns(self.path, self.kind, wanted):
            if not isinstance(text, str):
                raise invalid_data(f"{self.where(number)}: {self.text!r} is {text!r:.40}, expected a text", "data.text")
            if isinstance(label, float) and label.is_integer():  # 3 means the same in every kind of file
                label = int(label)
            if not isinstance(label, str | int) or not str(label).strip():
                wrong = f"{self.label!r} is {label!r:.40}, expected a whole number or a word"
                raise invalid_data(f"{self.where(number)}: {wrong}; type  data.label=COLUMN", "data.label")
            yield number, text, str(label).strip()

    def where(self, number: int) -> str:
        return locate_row(self.path, self.kind, number)


def _open_table(data: Any, looking: bool) -> LabelledSource:
    if data.path is None:
        raise missing_value("data.path", f"type  data.path=FILE.{data.source}")
    given, path = data.path, check_file(data.path, "data.path")
    test_path = None if data.test_path is None else check_file(data.test_path, "data.test_path")
    table = LabelledTable(path, data.source, data.text, data.label)
    scan = cache(lambda: _scan_labels(table, data.test_fraction if test_path is None else None))

    def side(held_out: bool) -> Iterator[Sample]:
        numbers, held_out_below = scan()
        for _, text, label in table.rows():
            if (hash_text(text) < held_out_below) == held_out:
                yield text, numbers[label]

    def test() -> Iterator[Sample]:
        if test_path is None:
            return side(held_out=True)
        return _iter_test_samples(replace(table, path=test_path), given, scan()[0])

    def fingerprint() -> str:
        held_out = {"test_fraction": str(data.test_fraction)} if test_path is None else {}
        files = [path] if test_path is None else [path, test_path]
        content = hash_files_cached(files, expand_cache(data.cache), looking)
        return _fingerprint_source(data, content, text=data.text, label=data.label, **held_out)

    return LabelledSource(lambda: side(held_out=False), test, fingerprint, lambda: tuple(scan()[0]))


def _scan_labels(table: LabelledTable, test_fraction: float | None) -> tuple[dict[str, int], int]:
    """Read the training file once; return (label -> number, the hash below which a row is held out, or 0 for none)."""
    path, labels, hashes = table.path, set[str](), HashRange()
    for _, text, label in table.rows():
        labels.add(label)
        if len(labels) > MAX_CLASSES:
            many = f"{table.label!r} has over {MAX_CLASSES:,} different values"
            raise invalid_data(f"{path}: {many}; type  data.label=COLUMN", "data.label")
        if test_fraction is not None:
            hashes.add(text)
    if not labels:
        raise invalid_data(f"{path}: there are no rows")
    if len(labels) == 1:
        same = f"every row has the same {table.label!r}, {labels.pop()!r}"
        raise invalid_data(f"{path}: {same}; at least two classes are needed (data.label=COLUMN)", "data.label")
    if hashes.is_single:
        same = f"every row has the same {table.text!r}, so none can be held out"
        raise invalid_data(f"{path}: {same}; type  data.test_path=FILE  or  data.text=COLUMN", "data.test_path")
    numeric = all(WHOLE_NUMBER.fullmatch(label) for label in labels)
    ordered = sorted(labels, key=lambda label: (int(label) if numeric else 0, label))
    held_out_below = hashes.threshold(test_fraction) if test_fraction is not None else 0
    return {label: number for number, label in enumerate(ordered)}, held_out_below


def _iter_test_samples(table: LabelledTable, train: Path, numbers: dict[str, int]) -> Iterator[Sample]:
    empty = True
    for number, text, label in table.rows():
        empty = False
        if label not in numbers:
            unknown = f"{table.where(number)}: label {label!r} is not in the training file {train}"
            raise invalid_data(f"{unknown}{did_you_mean(label, numbers)}", "data.test_path")
        yield text, numbers[label]
    if empty:
        raise invalid_data(f"data.test_path={table.path}: there are no rows", "data.test_path")


def _fingerprint_source(data: Any, content: object, **fields: object) -> str:
    return hash_value({"source": data.source, "limit": data.limit, "content": content, **fields})


def _reject_keys(data: Any, *keys: str) -> None:
    for key in keys:
        if (value := getattr(data, key)) is not None:
            reason = f"source {data.source} does not read it; drop it, or type  data.source=csv"
            raise reject_value(f"data.{key}", value, reason, "conflict")


@dataclass(frozen=True, eq=False)
class Tokens:
    """One split, read-only: the tokens of all texts concatenated, where each text begins, and the labels."""

    ids: Ids
    offsets: NDArray[np.int64]  # n + 1: text i is ids[offsets[i]:offsets[i + 1]]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = np.asarray(samples)
        return self.offsets[samples + 1] - self.offsets[samples]

    def gather(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        starts, lengths = self.offsets[np.asarray(samples)], self.lengths(samples)
        ends = np.cumsum(lengths)
        if not ends.size:
            return np.empty(0, np.int64)
        # Token j of the batch lies at j + (start of its text in the corpus - start of its text in the batch).
        positions = np.repeat(starts - ends + lengths, lengths)
        positions += np.arange(ends[-1])
        return self.ids[positions].astype(np.int64)


class TokenSamples:
    """One split as samples whose cost is their number of tokens."""

    def __init__(self, tokens: Tokens, longest: int) -> None:
        self.tokens, self.longest = tokens, longest

    def __len__(self) -> int:
        return len(self.tokens)

    def cost(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.tokens.lengths(ids)


@dataclass(frozen=True, eq=False)
class LabelledCorpus(TokenisedCorpus):
    classes: tuple[str, ...]
    train: Tokens
    test: Tokens
    open_source = staticmethod(open_source)
    prefix = ""
    framed: ClassVar[bool] = False
    settings = ("vocab", "max_length", "lowercase")

    @classmethod
    def build(cls, data: Any, source: LabelledSource, folder: Path, log: LogFn) -> BuiltCorpus:
        classes = source.classes()
        texts = (text for text, _ in source.train())
        chosen = load_tokenizer(data, texts, MASK, data.max_length, data.lowercase, log)
        counts, arrays, odd = {}, list[ArrayWriter](), list[str]()
        for name, samples in zip(SPLITS, (source.train(), source.test()), strict=True):
            counts[name], written = _write_split(folder, name, samples, chosen, len(classes), log, cls.framed)
            arrays += written
            odd += _describe_data_problems(name, counts[name], classes, data.max_length)
        train, test = counts.values()
        summary = (
            f"{train['samples']:,} training and {test['samples']:,} test texts in {len(classes)} classes, "
            f"{train['tokens'] / train['samples']:.1f} tokens each on average"
        )
        settings = {name: getattr(data, name) for name in cls.settings}
        return BuiltCorpus(chosen, counts, arrays, summary, odd, {"settings": settings, "classes": classes})

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        splits = {}
        for name in SPLITS:
            splits[name] = Tokens(*(map_array(folder / f"{name}.{part}.npy") for part in ("ids", "offsets", "labels")))
            if (len(splits[name].ids), len(splits[name])) != (meta[name]["tokens"], meta[name]["samples"]):
                raise DamagedEntry(f"the arrays of the {name} split do not fit together")
        return {"classes": tuple(meta["classes"]), **splits}

    def __str__(self) -> str:
        return f"{len(self.train):,} training and {len(self.test):,} test texts in {len(self.classes)} classes"


def _write_split(
    folder: Path, split: str, samples: Iterator[Sample], chosen: ChosenTokenizer, classes: int, log: LogFn, framed: bool
) -> tuple[dict[str, Any], list[ArrayWriter]]:
    """Tokenise a split into three arrays; return its counts and files."""
    cut = empty = 0
    per_class = np.zeros(classes, np.int64)
    log_progress = limit_rate(log)
    with (
        ArrayWriter(folder / f"{split}.ids.npy", chosen.dtype) as ids,
        ArrayWriter(folder / f"{split}.offsets.npy", np.int64) as offsets,
        ArrayWriter(folder / f"{split}.labels.npy", np.int64) as labels,
    ):
        offsets.append(np.zeros(1, np.int64))
        for group in group_texts(samples):
            group_labels = np.array([label for _, label in group], np.int64)
            batch = encode_texts(*chosen, [text for text, _ in group], framed)
            offsets.append(ids.length + np.cumsum(batch.lengths))
            ids.append(batch.ids)
            labels.append(group_labels)
            per_class += np.bincount(group_labels, minlength=classes)
            cut += batch.cut_texts
            empty += batch.empty_texts
            log_progress(f"corpus: {labels.length:,} {split} texts tokenised, {ids.length:,} tokens")
    if not labels.length:
        raise invalid_data(f"the {split} split has no rows; give more rows, or another data.test_fraction")
    counts = {"samples": labels.length, "tokens": ids.length, "cut": cut, "empty": empty}
    return {**counts, "per_class": per_class.tolist()}, [ids, offsets, labels]


def _describe_data_problems(
    split: str, counts: dict[str, Any], classes: tuple[str, ...], max_length: int
) -> Iterator[str]:
    """Yield a line for texts that were cut, for empty texts, and for classes without texts."""
    if counts["cut"]:
        share = counts["cut"] / counts["samples"]
        yield f"{counts['cut']:,} {split} texts ({share:.1%}) were cut at data.max_length={max_length}"
    if counts["empty"]:
        yield f"{counts['empty']:,} {split} texts are empty"
    missing = [name for name, n in zip(classes, counts["per_class"], strict=True) if not n]
    if missing:
        yield f"WARNING: no {split} text has the label {', '.join(missing[:12])}"


def find_ag_news_files(path: Path | None) -> tuple[Path, Path]:
    if path is None:
        raise missing_value("data.path", EXPECTED)
    folder = path.expanduser()
    files = [[folder / name for name in names if (folder / name).exists()] for names in (TRAIN_NAMES, TEST_NAMES)]
    for names, existing in zip((TRAIN_NAMES, TEST_NAMES), files, strict=True):
        if not existing:
            problem = f"there is no {names[0]}" if folder.is_dir() else "not a folder"
            raise reject_value("data.path", folder, f"{problem}; {EXPECTED}", "not-found")
    return check_file(files[0][0], "data.path"), check_file(files[1][0], "data.path")


def iter_ag_news(path: Path) -> Iterator[Sample]:
    empty = True
    for number, fields in open_csv(path, names=COLUMNS)[1]:
        empty = False
        if len(fields) != len(COLUMNS):
            raise invalid_format(f"{path} row {number} has {len(fields)} columns; AG News has 3: {', '.join(COLUMNS)}")
        given, title, description = fields
        label = int(given) if given.strip().isdecimal() else 0
        if not 1 <= label <= len(TOPICS):
            hint = "; AG News has no header row" if number == 1 else ""
            raise invalid_data(f"{path} row {number}: class {given!r} is not one of 1 to {len(TOPICS)}{hint}")
        yield unescape_text(f"{title} {description}"), label - 1
    if empty:
        raise invalid_data(f"{path}: there are no rows; {EXPECTED}")


def unescape_text(text: str) -> str:
    """Decode character entities, and turn backslashes (line breaks) and repeated blanks into single spaces."""
    text = text.replace("\\", " ")
    if ";" in text:
        text = DROPPED_AMPERSAND.sub(r"&\1;", text)
        text = html.unescape(SPACE_BEFORE_APOSTROPHE.sub("", text))
    return " ".join(text.split())
