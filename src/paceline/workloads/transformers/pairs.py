"""Tables of pairs, tokenised once: a text and the text that is to follow from it, or words and a tag for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.data.cache import ArrayWriter, map_array
from paceline.data.corpora.tokenised import SPLITS, BuiltCorpus, HashRange, TokenisedCorpus
from paceline.data.corpora.tokenizer import MASK, ChosenTokenizer, encode_texts, load_tokenizer
from paceline.data.files import check_file, hash_files_cached, hash_text, invalid_data
from paceline.data.tables import iter_columns, locate_row
from paceline.errors import UserError
from paceline.io.files import expand_cache, hash_value
from paceline.workload import LogFn

GROUP_ROWS = 1024
ARRAYS = ("ids", "offsets", "targets", "target_offsets")
NO_TAG = -100


@dataclass(frozen=True, eq=False)
class Pairs:
    """One split: the tokens of texts, and of each the tokens of its target, or a tag for each token."""

    ids: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray
    target_offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text_ids(self, number: int) -> np.ndarray:
        return self.ids[self.offsets[number] : self.offsets[number + 1]]

    def target_ids(self, number: int) -> np.ndarray:
        return self.targets[self.target_offsets[number] : self.target_offsets[number + 1]]


class PairTable:
    """The columns `data.text` and `data.label`; `words`: both are lists, or texts that blanks divide."""

    def __init__(self, data: Any, looking: bool = False, *, words: bool = False) -> None:
        self.data, self.words, self.looking = data, words, looking
        if data.path is None:
            raise UserError(f"type  data.path=FILE.{data.source}", code="missing-value", key="data.path")
        self.files = {"train": check_file(data.path, "data.path")}
        if data.test_path is not None:
            self.files["test"] = check_file(data.test_path, "data.test_path")

    def fingerprint(self) -> str:
        data = self.data
        content = hash_files_cached([*self.files.values()], expand_cache(data.cache), self.looking)
        fraction = data.test_fraction if "test" not in self.files else None
        return hash_value(["pairs", content, self.words, data.source, *self.wanted.values(), data.limit, fraction])

    @property
    def wanted(self) -> dict[str, str]:
        """The columns that are read, by the keys that name them."""
        return {"data.text": self.data.text, "data.label": self.data.label}

    def iter_pairs(self, split: str) -> Iterator[tuple[Any, Any]]:
        """Yield the pairs of a split; without a test file, some are held out by a hash of their text."""
        if "test" in self.files:
            pairs = self._iter_file(self.files[split])
        else:
            pairs = self._iter_file(self.files["train"])
            pairs = (p for p in pairs if (hash_text(str(p[0])) < self._threshold) == (split == "test"))
        return islice(pairs, (self.data.limit or None) if split == "train" else None)

    @cached_property
    def _threshold(self) -> int:
        hashes = HashRange()
        for text, _ in self._iter_file(self.files["train"]):
            hashes.add(str(text))
        if hashes.highest < 0 or hashes.is_single:
            raise invalid_data(f"{self.files['train']}: two different texts are needed, or  data.test_path=FILE")
        return hashes.threshold(self.data.test_fraction)

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """The tags of the training file, sorted; () of texts."""
        files = self._iter_file(self.files["train"]) if self.words else ()
        return tuple(sorted({tag for _, tags in files for tag in tags}))

    def _iter_file(self, file: Path) -> Iterator[tuple[Any, Any]]:
        for number, row in iter_columns(file, self.data.source, self.wanted):
            yield self.read_row(row, locate_row(file, self.data.source, number))

    def read_row(self, row: Sequence[Any], where: str) -> tuple[Any, Any]:
        text, target = (self._read_cell(value) for value in row)
        if text is None or target is None:
            kind = "words and tags, as lists or divided by blanks" if self.words else "two texts"
            raise invalid_data(f"{where}: expected {kind} in {' and '.join(map(repr, self.wanted.values()))}")
        if self.words and len(text) != len(target):
            raise invalid_data(f"{where}: {len(text)} words and {len(target)} tags")
        return text, target

    def _read_cell(self, value: Any) -> Any:
        if not self.words:
            return value if isinstance(value, str) else None
        words = value.split() if isinstance(value, str) else value
        return [str(word) for word in words] if isinstance(words, list) and words else None


@dataclass(frozen=True, eq=False)
class PairCorpus(TokenisedCorpus):
    """Texts and what is to follow from them."""

    classes: tuple[str, ...]
    train: Pairs
    test: Pairs
    open_source = staticmethod(partial(PairTable, words=False))
    prefix = "pairs-"
    settings: ClassVar[tuple[str, ...]] = ("vocab", "max_length")
    tagged: ClassVar[bool] = False

    @classmethod
    def build(cls, data: Any, source: PairTable, folder: Path, log: LogFn) -> BuiltCorpus:
        parts = (part for pair in source.iter_pairs("train") for part in pair[: 1 if cls.tagged else 2])
        texts = (" ".join(part) if cls.tagged else part for part in parts)
        chosen = load_tokenizer(data, texts, MASK, data.max_length, False, log)
        places = {tag: number for number, tag in enumerate(source.tags)}
        encode = partial(encode_tagged, places=places) if cls.tagged else encode_pairs
        arrays = [w for split in SPLITS for w in write_split(folder, split, source, chosen, encode)]
        train, test = count_rows(arrays)
        counts = {"train": {"samples": train}, "test": {"samples": test}}
        summary = f"{train:,} training and {test:,} test pairs"
        return BuiltCorpus(chosen, counts, arrays, summary, meta={"classes": source.tags})

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        splits = {split: Pairs(*(map_array(folder / f"{split}.{name}.npy") for name in ARRAYS)) for split in SPLITS}
        return {"classes": tuple(meta["classes"]), **splits}

    def __str__(self) -> str:
        return f"{len(self.train):,} training and {len(self.test):,} test pairs"


class TaggedCorpus(PairCorpus):
    """Words and a tag for each."""

    open_source = staticmethod(partial(PairTable, words=True))
    prefix = "tags-"
    tagged = True


def write_split(
    folder: Path, split: str, source: PairTable, chosen: ChosenTokenizer, encode: Callable[..., Any]
) -> list[ArrayWriter]:
    """Write the arrays of a split; `encode` yields the tokens of a group of pairs, and their targets."""
    kinds, pairs = (chosen.dtype, np.int64, np.int64, np.int64), source.iter_pairs(split)
    with ExitStack() as stack:
        files = zip(ARRAYS, kinds, strict=True)
        writers = [stack.enter_context(ArrayWriter(folder / f"{split}.{n}.npy", kind)) for n, kind in files]
        for offsets in writers[1::2]:
            offsets.append(np.zeros(1, np.int64))
        while group := list(islice(pairs, GROUP_ROWS)):
            for lists, at in zip(encode(chosen, group), (0, 2), strict=True):
                writers[at + 1].append(writers[at].length + np.cumsum([len(ids) for ids in lists], dtype=np.int64))
                writers[at].append(np.concatenate([*lists, np.empty(0, np.int64)]))
    return writers


def count_rows(writers: Sequence[ArrayWriter]) -> list[int]:
    """Return the rows of both splits; each must have some."""
    counts = [writers[at].length - 1 for at in (1, 5)]
    for split, rows in zip(SPLITS, counts, strict=True):
        if not rows:
            raise invalid_data(f"the {split} split has no rows; give more, or another data.test_fraction")
    return counts


def encode_pairs(chosen: ChosenTokenizer, pairs: list[tuple[str, str]]) -> Iterator[list[np.ndarray]]:
    """Yield the tokens of the texts, and those of their targets."""
    for texts in zip(*pairs, strict=True):
        found = encode_texts(*chosen, list(texts), framed=True)
        yield np.split(found.ids, np.cumsum(found.lengths)[:-1])


def encode_tagged(
    chosen: ChosenTokenizer, rows: Sequence[tuple[Sequence[str], Sequence[str]]], places: Mapping[str, int]
) -> Iterator[list[np.ndarray]]:
    """Yield the tokens of the words, and a number for each token: that of its tag if it is the first of a word."""
    texts, tags, frame = [], [], TextFrame.of(chosen)
    spaced = [[f" {word}" if number else word for number, word in enumerate(words)] for words, _ in rows]
    for (words, names), pieces in zip(rows, encode_pieces(chosen, spaced), strict=True):
        if unknown := [name for name in names if name not in places]:
            raise invalid_data(f"the tag {unknown[0]!r} of {words[0]!r} … is in no training row", "data.test_path")
        pairs = zip(pieces, names, strict=True)
        own = [tag for ids, name in pairs for tag in [places[name], *[NO_TAG] * (len(ids) - 1)][: len(ids)]]
        texts.append(frame.mark([token for piece in pieces for token in piece]))
        tags.append(frame.add(own, [NO_TAG] * len(frame.before), [NO_TAG] * len(frame.after)))
    yield texts
    yield tags


def encode_pieces(chosen: ChosenTokenizer, rows: Sequence[Sequence[str]]) -> Iterator[list[list[int]]]:
    """Yield the tokens of each piece of each row."""
    found = iter(chosen.tokenizer.encode_batch_fast([piece for row in rows for piece in row], add_special_tokens=False))
    for row in rows:
        yield [next(found).ids for _ in row]


@dataclass(frozen=True)
class TextFrame:
    """The tokens that mark a text, such as [CLS] … [SEP], and how long it may be with them."""

    before: list[int]
    after: list[int]
    longest: int
    empty: int

    @classmethod
    def of(cls, chosen: ChosenTokenizer) -> "TextFrame":
        assert chosen.tokenizer.truncation is not None, "set by load_tokenizer"
        return cls(*find_frame(chosen), chosen.tokenizer.truncation["max_length"], chosen.special)

    def add(self, ids: list[int], before: list[int], after: list[int]) -> np.ndarray:
        """Return the ids, cut, between the others."""
        return np.array([*before, *ids[: max(0, self.longest - len(before) - len(after))], *after] or [self.empty])

    def mark(self, ids: list[int]) -> np.ndarray:
        return self.add(ids, self.before, self.after)


def find_frame(chosen: ChosenTokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokeniser puts before and after a text."""
    plain, framed = (chosen.tokenizer.encode("a", add_special_tokens=marked).ids for marked in (False, True))
    at = next((at for at in range(len(framed)) if framed[at : at + len(plain)] == plain), 0)
    return framed[:at], framed[at + len(plain) :]
