"""Count the terms of texts, as a stream, from a folder of .txt files or the rows of a file."""

import html
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np

from paceline.data.files import iter_below, iter_lines, open_text
from paceline.data.tables import iter_columns, locate_row, table_kind
from paceline.errors import InvalidData, UserError
from paceline.workloads.topics.counts.matrices import Csr, SparseCounts, count_keys, join_rows, shrink
from paceline.workloads.topics.files.disk_counts import has_count_columns
from paceline.workloads.topics.files.shards import MANIFEST

BATCH_TOKENS = 1 << 20
WIDTH = 1 << 32  # of the numbers of terms: (document, term) is one number
SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
WORDS = re.compile(r"\b(?=\w*[^\W\d_])\w\w+\b")  # two characters or more, with a letter among them
TAG = re.compile(r"<(?:[/!]?[A-Za-z][^<>]{0,1000}|!--.{0,1000}?--)>", re.DOTALL)
Document = tuple[str | None, str]


@dataclass(frozen=True)
class TextOptions:
    """How texts become counts. `min_df` and `max_df` are numbers of documents, or floats: shares."""

    column: str = "text"
    name_column: str | None = None  # documents are named after it; files of a folder have their own names
    markup: bool = False  # whether tags such as <br /> and entities such as &amp; are words
    stop_words: str | Iterable[str] | None = "english"
    min_df: float = 2
    max_df: float = 0.95
    max_terms: int | None = None

    def rules(self) -> str:
        left_out = ["numbers"] if self.markup else ["markup", "numbers"]
        stop = len(read_stop_words(self.stop_words))
        left_out += [f"{stop} {'English ' * (self.stop_words == 'english')}stop words"] if stop else []
        left_out += [f"terms in fewer than {_format_limit(self.min_df)}", f"in more than {_format_limit(self.max_df)}"]
        most = f"; of the rest the {self.max_terms:,} most frequent" if self.max_terms else ""
        return f"terms are words, in lower case; left out: {', '.join(left_out)}{most}"


def _format_limit(documents: float) -> str:
    if isinstance(documents, int):
        return f"{documents:,} document{'s' * (documents != 1)}"
    return f"{100 * documents:g} % of the documents"


def strip_markup(text: str) -> str:
    text = TAG.sub(" ", text) if "<" in text else text
    return html.unescape(text) if "&" in text else text


def read_text(
    source: str | Path | Sequence[str], options: TextOptions | None = None, vocabulary: Sequence[str] | None = None
) -> SparseCounts:
    """Count the texts of a folder or file, or of a list of texts, in memory.

    With a vocabulary only its terms are counted, in its order: for new texts and an old model.
    """
    options = options or TextOptions()
    counter = TermCounter(options, vocabulary)
    parts = list(counter.count(iterate_documents(source, options.column, options.name_column)))
    if not parts:
        raise counter.empty_error(source)
    if vocabulary is not None:
        return SparseCounts(join_rows(parts), len(vocabulary), vocabulary=vocabulary, names=counter.names or None)
    places, terms = counter.vocabulary(source)
    kept = join_rows([_keep_terms(part, places) for part in parts])
    return SparseCounts(kept, len(terms), vocabulary=terms, names=counter.names or None)


class TermCounter:
    """One pass over texts: nonzeros in batches, with terms numbered as they come or by a given vocabulary."""

    def __init__(self, options: TextOptions, fixed: Sequence[str] | None = None) -> None:
        self.options, self.fixed, self.documents = options, fixed, 0
        self.names: list[str] = []
        stop = sorted(read_stop_words(options.stop_words))
        self._stop = len(stop)  # the first numbers are theirs, and are left out
        numbers = [*enumerate(fixed or (), self._stop), *enumerate(stop)]
        self._number: defaultdict[str, int] = defaultdict(int, {word: number for number, word in numbers})
        self._number.default_factory = self._number.__len__
        self._in_documents = np.zeros(0, np.int64)  # by number of the term: documents that contain it
        self._in_all = np.zeros(0, np.int64)  # how often it occurs

    def count(self, documents: Iterable[Document]) -> Iterator[Csr]:
        numbers, ends = array("i"), array("q")
        for name, text in documents:
            text = text if self.options.markup else strip_markup(text)
            tokens = WORDS.findall(text.lower())
            if self.fixed is None:
                numbers.extend(map(self._number.__getitem__, tokens))
            else:
                numbers.extend(map(self._number.get, tokens, repeat(-1)))
            ends.append(len(numbers))
            self.documents += 1
            if name is not None:
                self.names.append(name)
            if len(numbers) >= BATCH_TOKENS:
                yield self._count_batch(numbers, ends)
                numbers, ends = array("i"), array("q")
        if ends:
            yield self._count_batch(numbers, ends)

    def _count_batch(self, numbers: array, ends: array) -> Csr:
        terms, stops = np.array(numbers, np.int64), np.array(ends, np.int64)
        keys = np.repeat(np.arange(len(stops), dtype=np.int64) * WIDTH, np.diff(stops, prepend=0)) + terms
        found = count_keys(keys[terms >= self._stop], len(stops), WIDTH)
        if self.fixed is None:
            self._in_documents = _add_padded(self._in_documents, np.bincount(found.indices))
            self._in_all = _add_padded(self._in_all, np.bincount(found.indices, weights=found.data).astype(np.int64))
            return found
        return replace(found, indices=found.indices - np.int32(self._stop))

    def vocabulary(self, source: object) -> tuple[np.ndarray, list[str]]:
        """Return for every number its place among the terms to keep, or -1; and these terms, sorted."""
        if not self.documents:
            raise self.empty_error(source)
        words = np.array(list(self._number), dtype=object)
        self._in_documents = _add_padded(self._in_documents, np.zeros(len(words), np.int64))
        self._in_all = _add_padded(self._in_all, np.zeros(len(words), np.int64))
        least = max(1, _count_documents(self.options.min_df, self.documents))
        most = _count_documents(self.options.max_df, self.documents)
        kept = np.flatnonzero((self._in_documents >= least) & (self._in_documents <= most))
        if not kept.size:
            found = f"{len(words) - self._stop:,} terms in {self.documents:,} documents"
            limits = f"min_df={self.options.min_df:g} and max_df={self.options.max_df:g}"
            problem = f"of {found} none is left with {limits}; lower min_df or raise max_df"
            raise InvalidData(f"{_describe_source(source)}: {problem}", key="min_df")
        kept = kept[np.argsort(words[kept], kind="stable")]
        if self.options.max_terms is not None and kept.size > self.options.max_terms:
            often = np.argsort(-self._in_all[kept], kind="stable")[: self.options.max_terms]
            kept = kept[np.sort(often)]
        place = np.full(len(words), -1, np.int32)
        place[kept] = np.arange(kept.size, dtype=np.int32)
        return place, words[kept].tolist()

    def empty_error(self, source: object) -> UserError:
        return InvalidData(f"{_describe_source(source)}: there is no document")


def _count_documents(limit: float, documents: int) -> float:
    """Return a number of documents, where a float is a share: 1 is one document, 1.0 is all."""
    return limit if isinstance(limit, int) else limit * documents


def _add_padded(sums: np.ndarray, more: np.ndarray) -> np.ndarray:
    longer, shorter = (sums, more) if len(sums) >= len(more) else (more, sums)
    longer[: len(shorter)] += shorter
    return longer


def _keep_terms(part: Csr, place: np.ndarray) -> Csr:
    renumbered = replace(part, indices=place[part.indices])
    kept = renumbered.select(renumbered.indices >= 0, part.data)
    order = np.argsort(kept.row_numbers * WIDTH + kept.indices)
    return Csr(kept.indptr, kept.indices[order], shrink(kept.data[order]))


def read_stop_words(given: str | Iterable[str] | None) -> frozenset[str]:
    if given is None or given == "none":
        return frozenset()
    if not isinstance(given, str):
        return frozenset(given)
    if given == "english":
        return frozenset(Path(__file__).with_name("english_stop_words.txt").read_text(encoding="utf-8").split())
    path = Path(given).expanduser()
    if not path.is_file():
        message = f"stop_words={given}: give english, none, a list of words, or a file with a word per line"
        raise UserError(message, code="not-found", key="stop_words")
    with open_text(path) as lines:
        return frozenset(line.strip() for line in lines if line.strip())


def _describe_source(source: object) -> str:
    return str(source) if isinstance(source, str | Path) else "the texts"


def is_text(path: Path) -> bool:
    """Return whether `read_counts` reads this path as texts."""
    if path.is_dir():
        return not (path / MANIFEST).exists() and next(_iterate_text_files(path), None) is not None
    if path.suffix.lower() == ".parquet" and path.is_file():
        return not has_count_columns(path)
    return path.is_file() and suffix_of(path) in SUFFIXES


def suffix_of(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def iterate_documents(
    source: str | Path | Sequence[str], column: str, name_column: str | None = None
) -> Iterator[Document]:
    """Yield every document of a list of texts, a folder of files, or a file with a text per line or row."""
    if not isinstance(source, str | Path):
        yield from ((None, text) for text in source)
        return
    path = Path(source).expanduser()
    if path.is_dir():
        for file in sorted(_iterate_text_files(path)):
            with open_text(file) as opened:
                yield str(file.relative_to(path)), opened.read()
        return
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder", code="not-found")
    kind = table_kind(path)
    if not kind:
        yield from ((None, line) for line in iter_lines(path))
        return
    wanted = {"--text": column, **({"--name": name_column} if name_column else {})}
    for number, (text, *name) in iter_columns(path, kind, wanted):
        if not isinstance(text, str):
            where = locate_row(path, kind, number)
            raise InvalidData(f"{where}: {column!r} is not a text but {text!r:.40}", key="--text")
        yield str(name[0]) if name else None, text


def _iterate_text_files(folder: Path) -> Iterator[Path]:
    return (path for path in iter_below(folder) if path.name.lower().endswith((".txt", ".txt.gz")))
