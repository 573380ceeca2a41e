"""Corpora for language models: documents without labels, tokenised end to end into one memory-mapped array.

A long file is read in parts, so that it need not fit into memory and some of its parts can be held out.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.cache import ArrayWriter, DamagedEntry, map_array
from paceline.data.corpora import docstrings
from paceline.data.corpora.tokenised import SPLITS, BuiltCorpus, HashRange, Ids, TokenisedCorpus, limit_rate
from paceline.data.corpora.tokenizer import END, ChosenTokenizer, load_tokenizer
from paceline.data.files import (
    find_files,
    hash_files_cached,
    hash_text,
    invalid_data,
    iter_lines,
    open_text,
)
from paceline.errors import missing_value, reject_value
from paceline.io.files import expand_cache, hash_value
from paceline.workload import LogFn

if TYPE_CHECKING:
    from torch import Tensor

PART_CHARACTERS = 16 << 10
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go", ".rs", ".sh")
READ_SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES))  # of files in a folder
BATCH_PARTS = 256


class DocumentPart(NamedTuple):
    text: str
    held_out: bool
    ends: bool


@dataclass(frozen=True)
class DocumentSource:
    """`parts()` starts a new stream of the same parts; `fingerprint()` hashes the content."""

    parts: Callable[[], Iterator[DocumentPart]]
    fingerprint: Callable[[], str]


def open_documents(data: Any, looking: bool = False) -> DocumentSource:
    """Open the documents of `data.source`. `looking`: raise UserError rather than read much to hash it."""
    return _open_docstrings(data) if data.source == "docstrings" else _open_text_files(data, looking)


def _open_docstrings(data: Any) -> DocumentSource:
    if data.path is not None:
        raise reject_value("data.path", data.path, "type  data.source=text  to read it", "conflict")

    @cache
    def parts() -> list[DocumentPart]:
        train, test = docstrings.extract_samples(data.test_fraction, inspect.cleandoc)
        if data.limit:
            n_test = max(1, round(data.limit * data.test_fraction))
            train, test = train[: max(1, data.limit - n_test)], test[:n_test]
        return [DocumentPart(text, split is test, True) for split in (train, test) for text, _ in split]

    return DocumentSource(lambda: iter(parts()), lambda: _fingerprint_source(data, docstrings.list_source_versions()))


def _open_text_files(data: Any, looking: bool) -> DocumentSource:
    files = find_text_files(data.path)
    lines = data.documents == "lines"

    def texts() -> Iterator[tuple[Path, str]]:
        read = _iter_filled_lines if lines else _iter_parts
        return islice(((file, text) for file in files for text in read(file)), data.limit or None)

    @cache
    def threshold() -> int:
        hashes = HashRange()
        for _, text in texts():
            hashes.add(text)
        if hashes.highest < 0:
            raise invalid_data(f"data.path={data.path}: there is no text in it", "data.path")
        if hashes.is_single:
            hint = f"give several files, one of more than {PART_CHARACTERS // 1024} KiB, or  data.documents=lines"
            raise invalid_data(f"data.path={data.path}: one document, so none can be held out; {hint}", "data.path")
        return hashes.threshold(data.test_fraction)

    def parts() -> Iterator[DocumentPart]:
        held_out_below = threshold()
        sides = ((file, text, hash_text(text) < held_out_below) for file, text in texts())
        for (file, text, held_out), after in pairwise(chain(sides, [(None, "", False)])):
            yield DocumentPart(text, held_out, ends=lines or (file, held_out) != (after[0], after[2]))

    hash_texts = partial(hash_files_cached, files, expand_cache(data.cache), looking)
    return DocumentSource(parts, lambda: _fingerprint_source(data, hash_texts()))


def find_text_files(path: Path | None) -> list[Path]:
    if path is None:
        raise missing_value("data.path", "type  data.path=FILE, a folder or a pattern")
    return find_files(path, "data.path", READ_SUFFIXES)


def _iter_parts(file: Path) -> Iterator[str]:
    """Yield the text of a file in parts that end at a line or, if need be, at a word. Blank ones are left out."""
    rest = ""
    with open_text(file) as source:
        while block := source.read(PART_CHARACTERS - len(rest)):
            rest += block
            if len(rest) < PART_CHARACTERS:
                continue
            end = max(rest.rfind("\n"), 0) or max(rest.rfind(" "), 0) or len(rest) - 1
            part, rest = rest[: end + 1], rest[end + 1 :]
            if part.strip():
                yield part
    if rest.strip():
        yield rest


def _iter_filled_lines(file: Path) -> Iterator[str]:
    return (text for line in iter_lines(file) if (text := line.rstrip("\r\n")).strip())


def _fingerprint_source(data: Any, content: object) -> str:
    settings = {"source": data.source, "limit": data.limit, "test_fraction": data.test_fraction, "content": content}
    return hash_value({"lm": settings, **({"documents": "lines"} if data.documents == "lines" else {})})


@dataclass(frozen=True, eq=False)
class TokenStreams(TokenisedCorpus):
    """The tokens of all documents of a split. An end token separates documents, and precedes the first."""

    train: Ids
    test: Ids
    open_source = staticmethod(open_documents)
    prefix = "lm-"
    settings = ("vocab",)

    @classmethod
    def build(cls, data: Any, source: DocumentSource, folder: Path, log: LogFn) -> BuiltCorpus:
        train_texts = (part.text for part in source.parts() if not part.held_out)
        chosen = load_tokenizer(data, train_texts, END, None, False, log)
        counts, arrays = _write_streams(folder, source.parts(), chosen, log)
        train, test = counts.values()
        kind = f" (one is a {data.documents.removesuffix('s')})" if data.source == "text" else ""
        summary = (
            f"{train['tokens']:,} training tokens in {train['documents']:,} documents and "
            f"{test['tokens']:,} test tokens in {test['documents']:,}{kind}"
        )
        return BuiltCorpus(chosen, counts, arrays, summary)

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        splits = {split: map_array(folder / f"{split}.npy") for split in SPLITS}
        for split, ids in splits.items():
            if ids.shape != (meta[split]["tokens"],):
                raise DamagedEntry(f"the {split} split has {ids.size:,} tokens instead of {meta[split]['tokens']:,}")
        return splits

    def __str__(self) -> str:
        return f"{len(self.train):,} training and {len(self.test):,} test tokens"


def _write_streams(
    folder: Path, parts: Iterator[DocumentPart], chosen: ChosenTokenizer, log: LogFn
) -> tuple[dict[str, dict[str, int]], list[ArrayWriter]]:
    """Write the tokens of both splits; return their counts and files."""
    (tokenizer, end), dtype = chosen, chosen.dtype
    documents = [0, 0]
    log_progress = limit_rate(log)
    with ExitStack() as open_files:
        writers = [open_files.enter_context(ArrayWriter(folder / f"{split}.npy", dtype)) for split in SPLITS]
        for writer in writers:
            writer.append(np.full(1, end, dtype))
        while batch := list(islice(parts, BATCH_PARTS)):
            encodings = tokenizer.encode_batch_fast([part.text for part in batch], add_special_tokens=False)
            tokens: list[list[list[int]]] = [[], []]
            for part, encoding in zip(batch, encodings, strict=True):
                tokens[part.held_out] += [encoding.ids, [end]] if part.ends else [encoding.ids]
                documents[part.held_out] += part.ends
            for writer, lists in zip(writers, tokens, strict=True):
                writer.append(np.fromiter(chain.from_iterable(lists), dtype))
            log_progress(f"corpus: {writers[0].length:,} training tokens written")
        for split, writer in zip(SPLITS, writers, strict=True):
            if writer.length < 2:
                raise invalid_data(f"the {split} split has no text; give more, or another data.test_fraction")
    counts = [{"tokens": writer.length, "documents": n} for writer, n in zip(writers, documents, strict=True)]
    return dict(zip(SPLITS, counts, strict=True)), writers


class LMBatch(NamedTuple):
    """Tokens (B, S) and what follows each of them (B, S); NOT_COUNTED where there is nothing to predict."""

    tokens: "Tensor"
    targets: "Tensor"


class Windows:
    """One split of a corpus, cut into samples of `sequence` tokens. Every token but the very first is predicted once.

    The last sample may be shorter, and is filled up with targets that do not count.
    """

    pads_empty = True

    def __init__(self, ids: Ids, sequence: int, half_only: bool = False) -> None:
        self.ids, self.sequence, self.half_only = ids, sequence, half_only

    def __len__(self) -> int:
        return -(-(len(self.ids) - 1) // self.sequence)

    def cost(self, ids: np.ndarray) -> NDArray[np.int64]:
        return np.minimum(self.sequence, len(self.ids) - 1 - np.asarray(ids, np.int64) * self.sequence)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> LMBatch:
        return self.padded(ids, keys, len(ids))

    def padded(self, ids: np.ndarray, keys: np.ndarray, rows: int) -> LMBatch:
        import torch

        from paceline.nn.chunked_loss import NOT_COUNTED

        assert len(ids) <= rows, "more samples than rows"
        tokens_RS = np.zeros((rows, self.sequence), np.int64)
        targets_RS = np.full((rows, self.sequence), NOT_COUNTED, np.int64)
        for row, begin in enumerate(np.asarray(ids, np.int64) * self.sequence):
            window = self.ids[begin : begin + self.sequence + 1]
            tokens_RS[row, : len(window) - 1] = window[:-1]
            targets_RS[row, : len(window) - 1] = window[1:]
        return LMBatch(torch.from_numpy(tokens_RS), torch.from_numpy(targets_RS))

    def fixed_shape_batches(self, cuts: list[tuple[np.ndarray, np.ndarray]], most: int) -> list[LMBatch]:
        return [self.padded(*cut, most) for cut in cuts]
