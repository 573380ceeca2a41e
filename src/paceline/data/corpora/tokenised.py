"""Tokenised corpora: a folder of memory-mapped arrays, found in the cache by the hash of its content and settings.

Beside the arrays are `tokenizer.json` and, written last, `meta.json` with the size and checksum of every file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data import cache
from paceline.data.cache import ArrayWriter
from paceline.data.corpora import tokenizer as tokenizers
from paceline.data.corpora.tokenizer import ChosenTokenizer, EncodedTexts, restore_tokenizer, vocabulary_size
from paceline.data.files import hash_text, unreadable_error
from paceline.errors import UserError
from paceline.io.files import expand_cache, hash_value, read_bytes, read_json, read_text, write_atomic, write_json
from paceline.workload import LogFn, Workload, ignore_log

if TYPE_CHECKING:
    from typing import Self

    from tokenizers import Tokenizer

FORMAT = 1  # raise it when the files of an entry change their meaning
SPLITS = ("train", "test")
TOKENIZER = "tokenizer.json"
META = "meta.json"
VOCABULARY = "vocabulary.json"
CLASSES_FILE = "classes.json"
PROGRESS_S = 10.0

Ids = NDArray[np.uint16] | NDArray[np.uint32]


class BuiltCorpus(NamedTuple):
    """A corpus whose files are all written but META, which gets the counts of each split, and `meta`."""

    chosen: ChosenTokenizer
    counts: Mapping[str, Mapping[str, Any]]
    arrays: Sequence[ArrayWriter]
    summary: str
    warnings: Sequence[str] = ()
    meta: Mapping[str, Any] = {}


@dataclass(frozen=True, eq=False)
class TokenisedCorpus:
    """A prepared corpus. `fingerprint` is a hash of its content."""

    folder: Path
    vocab: int
    special: int  # a token that no text contains: the end of a document, or the mask of a word
    fingerprint: str
    open_source: ClassVar[Any]  # opens the texts of a section `data`; `fingerprint()` of the result hashes them
    prefix: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]

    @classmethod
    def cached(cls, data: Any) -> Self | None:
        """Return the corpus of a section `data` if it is in the cache, unverified; None also if that takes long."""
        try:
            folder = cls._locate_entry(data, cls.open_source(data, looking=True).fingerprint())
        except (UserError, OSError):
            return None
        return cache.open_entry(folder, cls.open, verify=False)

    @classmethod
    def prepare(cls, data: Any, log: LogFn = ignore_log, verify: bool = True) -> Self:
        """Return the corpus of a section `data` from the cache, or build it; `verify` compares its checksums."""
        source = cls.open_source(data)
        fingerprint = source.fingerprint()
        folder, built = cls._locate_entry(data, fingerprint), list[bool]()

        def build(folder: Path) -> None:
            cls._build_entry(data, source, fingerprint, log, folder)
            built.append(True)

        corpus = cache.prepare_entry(folder, cls.open, build, log, verify)
        if not built:
            log(f"corpus: {corpus}, from {folder}")
        return corpus

    @classmethod
    def _locate_entry(cls, data: Any, fingerprint: str) -> Path:
        settings = {name: getattr(data, name) for name in cls.settings}
        if data.tokenizer is not None:
            settings["vocab"] = tokenizers.hash_tokenizer(data)
        key = hash_value([FORMAT, fingerprint, *settings.values()])[:16]
        return Path(expand_cache(data.cache).absolute() / f"{cls.prefix}{data.source}-{key}")

    @classmethod
    def _build_entry(cls, data: Any, source: Any, fingerprint: str, log: LogFn, folder: Path) -> None:
        began_s = time.monotonic()
        learning = f"learning a vocabulary of {data.vocab:,} tokens"
        log(f"corpus: reading {data.source}, {f'tokenising it with {data.tokenizer}' if data.tokenizer else learning}")
        with tokenizers.use_all_cores():
            built = cls.build(data, source, folder, log)
        files = {writer.path.name: writer.facts for writer in built.arrays}
        files[TOKENIZER] = cache.write_synced(folder / TOKENIZER, built.chosen.tokenizer.to_str().encode("utf-8"))
        content = "".join(files[name]["sha256"] for name in sorted(files))
        vocab = vocabulary_size(built.chosen.tokenizer)
        meta = {
            "format": FORMAT,
            "source": {"name": data.source, "fingerprint": fingerprint},
            "vocab": vocab,
            "special": built.chosen.special,
            "fingerprint": hashlib.sha256(content.encode()).hexdigest(),
            **built.meta,
            **built.counts,
            "files": files,
        }
        cache.write_facts(folder / META, meta)
        for line in (
            f"{built.summary}, {vocab:,} in the vocabulary ({time.monotonic() - began_s:.1f} s)",
            *built.warnings,
        ):
            log(f"corpus: {line}")

    @classmethod
    def open(cls, folder: Path, verify: bool = False) -> Self:
        """Map a prepared corpus; DamagedEntry if it is incomplete or, with `verify`, changed."""
        meta = cache.read_facts(folder / META, verify)
        special = meta.get("special", 0)  # older ones have a learned vocabulary, where it is token 0
        return cls(folder, meta["vocab"], special, meta["fingerprint"], **cls.read_fields(folder, meta))

    @classmethod
    def build(cls, data: Any, source: Any, folder: Path, log: LogFn) -> BuiltCorpus:
        """Learn a vocabulary, or take the user's, and stream both splits into the folder."""
        raise NotImplementedError

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return restore_tokenizer(read_text(self.folder / TOKENIZER))

    def __reduce__(self) -> tuple[Callable[[Path], Self], tuple[Path]]:
        return type(self).open, (self.folder,)  # another process maps the same files instead of copying them


def limit_rate(log: LogFn) -> LogFn:
    """Return a log for progress, which drops all but one line in PROGRESS_S."""
    logged_s = time.monotonic()

    def log_progress(line: str) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s > PROGRESS_S:
            logged_s = time.monotonic()
            log(line)

    return log_progress


@dataclass
class HashRange:
    """The range of the hashes of texts. A text is held out by its hash, so that equal texts are on the same side."""

    lowest: int = 1 << 64
    highest: int = -1

    def add(self, text: str) -> None:
        value = hash_text(text)
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)

    @property
    def is_single(self) -> bool:
        return self.lowest == self.highest

    def threshold(self, fraction: float) -> int:
        """Return the hash below which a text is held out, moved just enough for both sides to have a text."""
        return min(max(int(fraction * 2**64), self.lowest + 1), self.highest)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What using a trained model needs of its corpus: the tokenizer in `folder`, and the names of the classes."""

    folder: Path
    size: int
    special: int
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, corpus: TokenisedCorpus) -> Vocabulary:
        return cls(corpus.folder, corpus.vocab, corpus.special, getattr(corpus, "classes", ()))

    @classmethod
    def open(cls, folder: Path) -> Vocabulary:
        file = folder / CLASSES_FILE
        facts = read_json(folder / VOCABULARY)
        try:
            classes = json.loads(read_text(file)) if file.exists() else []
            if not 0 <= facts["special"] < facts["size"]:
                raise ValueError("its special token is not in the vocabulary")
            return cls(folder, facts["size"], facts["special"], tuple(map(str, classes)))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{folder} is damaged: no vocabulary can be read ({error})", code="damaged") from None

    def copy_tokenizer(self, folder: Path) -> None:
        try:
            write_atomic(folder / TOKENIZER, read_bytes(self.folder / TOKENIZER))
        except OSError as error:
            raise unreadable_error(self.folder / TOKENIZER, error) from None

    def keep(self, folder: Path) -> None:
        self.copy_tokenizer(folder)
        if self.classes:
            write_json(folder / CLASSES_FILE, list(self.classes))
        write_json(folder / VOCABULARY, {"size": self.size, "special": self.special})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        try:
            return restore_tokenizer(read_text(self.folder / TOKENIZER))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder / TOKENIZER} is damaged: {error}", code="damaged") from None

    def encode(self, texts: list[str]) -> EncodedTexts:
        if self.tokenizer.truncation is None:
            raise UserError(f"{self.folder / TOKENIZER} is damaged: it has no truncation", code="damaged")
        return tokenizers.encode_texts(self.tokenizer, self.special, texts)


class CorpusWorkload(Workload):
    """Trains on a tokenised corpus, which is verified before ranks start; a finished run keeps its vocabulary."""

    Corpus: ClassVar[type[TokenisedCorpus]]
    unit = "tokens"

    def prepare(self, log: LogFn) -> None:
        self.corpus = self.Corpus.prepare(self.spec.data, log)

    @cached_property
    def corpus(self) -> Any:
        return self.Corpus.prepare(self.spec.data, verify=False)

    def fingerprint(self) -> str:
        return str(self.corpus.fingerprint)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.corpus) if self.kept is None else Vocabulary.open(self.kept)

    def keep(self, folder: Path) -> None:
        self.vocabulary.keep(folder)
