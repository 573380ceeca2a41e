"""Texts to counts: a folder of .txt files, or the rows of a CSV, JSONL, text or Parquet file.

Texts stream. In memory are the vocabulary and, unless the counts go to shards, the nonzeros.
"""

from __future__ import annotations

import html
import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path

import numpy as np

from paceline.data.files import FileWalk, iter_csv_records, iter_json_lines, iter_lines, open_text
from paceline.data.tables import PARQUET_BATCH_ROWS, open_parquet
from paceline.errors import UserError, did_you_mean, join_names
from paceline.workloads.topics.counts.matrices import Csr, SparseCounts, count_keys, find_integer_type, join_rows
from paceline.workloads.topics.files.disk_counts import has_count_columns
from paceline.workloads.topics.files.shards import MANIFEST

BATCH_TOKENS = 1 << 20
WIDTH = 1 << 32  # of the numbers of terms: (document, term) is one number
SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
# Words that say little about the subject of a text: articles, pronouns, prepositions and the like.
_LINES = (
    "a an the this that these those such same other another each every either neither both all any some no none",
    "i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself",
    "we us our ours ourselves they them their theirs themselves one ones who whom whose which what whatever whoever",
    "someone something somebody anyone anything anybody everyone everything everybody nobody nothing",
    "and or but nor so yet if unless because since although though while whereas whether than as until",
    "of in on at by for with without within from to into onto upon over under above below between among through",
    "during before after against about around across along behind beside besides beyond toward towards via per off",
    "out up down near am is are was were be been being have has had having do does did doing done",
    "can could may might must shall should will would ought not never only just also too very more most much many",
    "few fewer less least little quite rather almost here there where when why how then now again once ever always",
    "often sometimes still already thus hence therefore however moreover otherwise else instead perhaps",
    "don doesn didn isn aren wasn weren hasn haven hadn won wouldn couldn shouldn cannot ain ll ve re",
)
ENGLISH = frozenset(word for line in _LINES for word in line.split())

WORDS = r"\b(?=\w*[^\W\d_])\w\w+\b"
"""Two signs or more, with a letter among them."""
MOST_STOP_BYTES = 1 << 20
"""Of a file of words to leave out."""
TAG = re.compile(r"<(?:[/!]?[A-Za-z][^<>]{0,1000}|!--.{0,1000}?--)>", re.DOTALL)


@dataclass(frozen=True)
class TextOptions:
    """How texts become counts. `min_df` and `max_df` are numbers of documents, or, if not whole numbers, shares."""

    column: str = "text"
    name_column: str | None = None  # documents are named after it; files of a folder have their own names
    lower_case: bool = True
    token_pattern: str = WORDS
    markup: bool = False  # whether tags such as <br /> and signs such as &amp; are words
    stop_words: str | Iterable[str] | None = "english"
    min_df: float = 2
    max_df: float = 0.95
    max_terms: int | None = None

    def rules(self) -> str:
        """What counts as a term, in words."""
        left_out = ["markup"] if not self.markup else []
        left_out += ["numbers"] if self.token_pattern == WORDS else []
        stop = len(_stop_words(self.stop_words))
        left_out += [f"{stop} {'English ' * (self.stop_words == 'english')}stop words"] if stop else []
        left_out += [f"terms in fewer than {_limit(self.min_df)}", f"in more than {_limit(self.max_df)}"]
        terms = "words" if self.token_pattern == WORDS else f"what {self.token_pattern} matches"
        cased = ", in lower case" if self.lower_case else ""
        most = f"; of the rest the {self.max_terms:,} most frequent" if self.max_terms else ""
        return f"terms are {terms}{cased}; left out: {', '.join(left_out)}{most}"


def _limit(documents: float) -> str:
    if isinstance(documents, int):
        return f"{documents:,} document{'s' * (documents != 1)}"
    return f"{100 * documents:g} % of the documents"


def strip_markup(text: str) -> str:
    """Tags become spaces, and signs such as &amp; what they stand for."""
    text = TAG.sub(" ", text) if "<" in text else text
    return html.unescape(text) if "&" in text else text


def read_text(
    source: str | Path | Sequence[str], options: TextOptions | None = None, vocabulary: Sequence[str] | None = None
) -> SparseCounts:
    """Counts of the texts of a folder or file, or of a list of texts, in memory.

    With a vocabulary only its terms are counted, in its order: for new texts and an old model.
    """
    options = options or TextOptions()
    counting = TermCounter(options, vocabulary)
    parts = list(counting.count(iterate_documents(source, options.column, options.name_column)))
    if not parts:
        raise UserError(f"{describe_source(source)}: there is no document")
    if vocabulary is not None:
        return SparseCounts(join_rows(parts), len(vocabulary), vocabulary=vocabulary, names=counting.names or None)
    places, terms = counting.vocabulary(describe_source(source))
    kept = join_rows([_kept(part, places) for part in parts])
    return SparseCounts(kept, len(terms), vocabulary=terms, names=counting.names or None)


@dataclass
class TermCounter:
    """One pass over texts: nonzeros in batches, with terms numbered as they come or by a given vocabulary."""

    options: TextOptions
    fixed: Sequence[str] | None = None
    documents: int = 0
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        stop = sorted(_stop_words(self.options.stop_words))
        self._stop = len(stop)  # the first numbers are theirs, and are left out
        self._number: dict[str, int] = {word: number for number, word in enumerate(stop)}
        if self.fixed is None:
            growing: defaultdict[str, int] = defaultdict(int, self._number)
            growing.default_factory = growing.__len__
            self._number = growing
        else:
            self._number = {term: self._stop + place for place, term in enumerate(self.fixed)} | self._number
        self._in_documents = np.zeros(0, np.int64)  # by number of the term: documents that hold it
        self._in_all = np.zeros(0, np.int64)  # how often it occurs
        self._tokens = _pattern(self.options.token_pattern).findall

    def count(self, documents: Iterable[tuple[str | None, str]]) -> Iterator[Csr]:
        numbers, ends = array("i"), array("q")
        for name, text in documents:
            text = text if self.options.markup else strip_markup(text)
            tokens = self._tokens(text.lower() if self.options.lower_case else text)
            if self.fixed is None:
                numbers.extend(map(self._number.__getitem__, tokens))
            else:
                numbers.extend(map(self._number.get, tokens, repeat(-1)))
            ends.append(len(numbers))
            self.documents += 1
            if name is not None:
                self.names.append(name)
            if len(numbers) >= BATCH_TOKENS:
                yield self._batch(numbers, ends)
                numbers, ends = array("i"), array("q")
        if ends:
            yield self._batch(numbers, ends)

    def _batch(self, numbers: array, ends: array) -> Csr:
        """Tokens counted; stop words have the first numbers, and are left out."""
        terms, stops = np.array(numbers, np.int64), np.array(ends, np.int64)
        keys = np.repeat(np.arange(len(stops), dtype=np.int64) * WIDTH, np.diff(stops, prepend=0)) + terms
        found = count_keys(keys[terms >= self._stop], len(stops), WIDTH)
        if self.fixed is None:
            self._in_documents = _added(self._in_documents, np.bincount(found.indices))
            self._in_all = _added(self._in_all, np.bincount(found.indices, weights=found.data).astype(np.int64))
            return found
        return replace(found, indices=found.indices - np.int32(self._stop))

    def vocabulary(self, source: str) -> tuple[np.ndarray, list[str]]:
        """For every number so far its place among the terms to keep, or -1; and these, in alphabetical order."""
        if not self.documents:
            raise UserError(f"{source}: there is no document")
        words = np.array(list(self._number), dtype=object)
        self._in_documents = _added(self._in_documents, np.zeros(len(words), np.int64))
        self._in_all = _added(self._in_all, np.zeros(len(words), np.int64))
        least = max(1, _documents_of(self.options.min_df, self.documents))
        most = _documents_of(self.options.max_df, self.documents)
        kept = np.flatnonzero((self._in_documents >= least) & (self._in_documents <= most))
        if not kept.size:
            raise UserError(
                f"{source}: of {len(words) - self._stop:,} terms in {self.documents:,} documents none is left with "
                f"min_df={self.options.min_df:g} and max_df={self.options.max_df:g}; lower min_df or raise max_df"
            )
        kept = kept[np.argsort(words[kept], kind="stable")]
        if self.options.max_terms is not None and kept.size > self.options.max_terms:
            often = np.argsort(-self._in_all[kept], kind="stable")[: self.options.max_terms]
            kept = kept[np.sort(often)]
        place = np.full(len(words), -1, np.int32)
        place[kept] = np.arange(kept.size, dtype=np.int32)
        return place, words[kept].tolist()


def _pattern(given: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise UserError(f"token_pattern={given!r}: not a regular expression ({error})") from None
    if pattern.groups > 1:
        raise UserError(f"token_pattern={given!r}: has {pattern.groups} groups; at most one is possible, the token")
    return pattern


def _documents_of(limit: float, documents: int) -> float:
    """A whole number is a number of documents, a float is a share: 1 is one document, 1.0 is all of them."""
    return limit if isinstance(limit, int) else limit * documents


def _added(sums: np.ndarray, more: np.ndarray) -> np.ndarray:
    longer, shorter = (sums, more) if len(sums) >= len(more) else (more, sums)
    longer[: len(shorter)] += shorter
    return longer


def _kept(part: Csr, place: np.ndarray) -> Csr:
    """Terms renumbered by their place and sorted again; those of place -1 are left out."""
    renumbered = replace(part, indices=place[part.indices])
    kept = renumbered.only(renumbered.indices >= 0, part.data)
    order = np.argsort(kept.row_numbers * WIDTH + kept.indices)
    data = kept.data[order].astype(find_integer_type(kept.data.max(initial=0)) or np.int32)
    return Csr(kept.indptr, kept.indices[order], data)


def _stop_words(given: str | Iterable[str] | None) -> frozenset[str]:
    if given is None or given == "none":
        return frozenset()
    if isinstance(given, str):
        if given == "english":
            return ENGLISH
        path = Path(given).expanduser()
        if not path.is_file():
            raise UserError(f"stop_words={given}: give english, none, a list of words, or a file with a word per line")
        if path.stat().st_size > MOST_STOP_BYTES:
            raise UserError(f"stop_words={given}: has more than {MOST_STOP_BYTES:,} bytes; is it a list of words?")
        with open_text(path) as lines:
            return frozenset(line.strip() for line in lines if line.strip())
    return frozenset(given)


def describe_source(source: str | Path | Sequence[str]) -> str:
    return str(source) if isinstance(source, str | Path) else "the texts"


def is_text(path: Path) -> bool:
    """Whether `read_counts` takes this path for texts."""
    if path.is_dir():
        return not (path / MANIFEST).exists() and next(_text_files(path), None) is not None
    if path.suffix.lower() == ".parquet" and path.is_file():
        return not has_count_columns(path)
    return is_text_file(path)


def is_text_file(path: Path) -> bool:
    """The same of a file that is not Parquet, by its name."""
    return path.is_file() and suffix_of(path) in SUFFIXES


def suffix_of(path: Path) -> str:
    """The last one, in lower case, of what is compressed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def iterate_documents(
    source: str | Path | Sequence[str], column: str, name_column: str | None
) -> Iterator[tuple[str | None, str]]:
    """(name or None, text) of every document."""
    if not isinstance(source, str | Path):
        return ((None, text) for text in source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file or folder")
    suffix = suffix_of(path)
    if suffix in (".csv", ".tsv"):
        return _csv(path, column, name_column, "\t" if suffix == ".tsv" else ",")
    if suffix in (".jsonl", ".ndjson"):
        return _jsonl(path, column, name_column)
    if suffix == ".parquet":
        return _parquet(path, column, name_column)
    return _lines(path)


def _text_files(folder: Path) -> Iterator[Path]:
    return (path for path in FileWalk().iter_below(folder) if path.name.lower().endswith((".txt", ".txt.gz")))


def _folder(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(_text_files(folder)):
        with open_text(path) as file:
            yield str(path.relative_to(folder)), file.read()


def _lines(path: Path) -> Iterator[tuple[None, str]]:
    for line in iter_lines(path):
        yield None, line


def _csv(path: Path, column: str, name_column: str | None, delimiter: str) -> Iterator[tuple[str | None, str]]:
    records = iter_csv_records(path, delimiter)
    header = next(records, (0, []))[1]
    text_at = find_text_column(header, column, path)
    name_at = None if name_column is None else find_text_column(header, name_column, path)
    for number, fields in records:
        if len(fields) <= max(text_at, name_at or 0):
            raise UserError(
                f"{path} row {number}: {len(fields)} columns, the header has {len(header)}; quote a text that holds "
                "line breaks or the separator"
            )
        yield None if name_at is None else fields[name_at], fields[text_at]


def _jsonl(path: Path, column: str, name_column: str | None) -> Iterator[tuple[str | None, str]]:
    for number, _, item in iter_json_lines(path):
        if not isinstance(item, dict):
            raise UserError(f'{path} line {number}: each line holds one object:  {{"{column}": "words"}}')
        for wanted in (column, name_column):
            if wanted is not None and wanted not in item:
                find_text_column(list(item), wanted, path, f" line {number}")
        text = item[column]
        if not isinstance(text, str):
            raise UserError(f"{path} line {number}: {column!r} is not a text but {json.dumps(text)[:40]}")
        yield str(item[name_column]) if name_column else None, text


def _parquet(path: Path, column: str, name_column: str | None) -> Iterator[tuple[str | None, str]]:
    wanted = [column] + ([name_column] if name_column else [])
    with open_parquet(path) as file:
        for name in wanted:
            find_text_column(file.schema_arrow.names, name, path)
        number = 0
        for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=wanted, use_threads=False):
            values = batch.column(column).to_pylist()
            names = batch.column(name_column).to_pylist() if name_column else [None] * len(values)
            for document, text in zip(names, values, strict=True):
                number += 1
                if not isinstance(text, str):
                    raise UserError(f"{path} row {number}: {column!r} is not a text but {text!r:.40}")
                yield None if name_column is None else str(document), text


def find_text_column(columns: Sequence[str], name: str, path: Path, where: str = "") -> int:
    """Where the column is; without it, an error that names those that are there."""
    if name in columns:
        return list(columns).index(name)
    there = join_names(columns, 12) or "nothing"
    raise UserError(
        f"{path}{where}: there is no column {name!r}{did_you_mean(name, columns)} (there: {there}); name it as  "
        "--text NAME  or  TextOptions(column=NAME)"
    )
