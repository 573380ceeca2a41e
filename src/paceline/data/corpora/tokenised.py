"""Tokenised corpora: a folder of memory-mapped arrays, found in the cache by the hash of its content and settings.

Beside the arrays lie `tokenizer.json` and, written last, `meta.json` with the size and the checksum of every file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data import cache
from paceline.data.cache import ArrayWriter, DamagedEntry, LogFn, add_seal, read_facts, write_synced
from paceline.data.corpora.tokenizer import ChosenTokenizer, hash_tokenizer, vocabulary_size
from paceline.data.files import hash_text, hash_value
from paceline.errors import UserError
from paceline.io.files import read_json, write_atomic, write_json
from paceline.io.safe_open import read_bytes, read_text

if TYPE_CHECKING:
    from typing import Self

    from tokenizers import Tokenizer

    from paceline.data.corpora.tokenizer import EncodedTexts


FORMAT = 1  # raise it when the files of an entry change their meaning
SPLITS = ("train", "test")
TOKENIZER = "tokenizer.json"
META = "meta.json"
PROGRESS_S = 10.0
RETRIES, RETRY_S = 20, 0.1

Ids = NDArray[np.uint16] | NDArray[np.uint32]


class WrittenSplit(NamedTuple):
    """One split that was written."""

    counts: dict[str, Any]
    arrays: Sequence[ArrayWriter]


class BuiltCorpus(NamedTuple):
    """All files of a corpus but the last, which `meta` goes into."""

    chosen: ChosenTokenizer
    splits: Mapping[str, WrittenSplit]
    summary: str
    warnings: Sequence[str] = ()
    meta: Mapping[str, Any] = {}


class CorpusSettings(Protocol):
    """Fields of the run file that every corpus of texts has."""

    @property
    def source(self) -> str: ...

    path: Path | None
    test_fraction: float
    vocab: int
    tokenizer: Path | None
    limit: int
    cache: Path


@dataclass(frozen=True, eq=False)
class TokenisedCorpus:
    """What all prepared corpora have. `fingerprint` is a hash of their content."""

    folder: Path
    vocab: int  # tokens in the vocabulary; fewer than asked for where the texts are few
    special: int  # the id of a token that no text contains: the end of a document, or the mask of a word
    fingerprint: str
    open_source: ClassVar[Any]
    """A function of the section: where the texts come from. Its `fingerprint()` names their content."""
    prefix: ClassVar[str]
    """Of the folder's name in the cache."""
    settings: ClassVar[tuple[str, ...]]
    """Fields of the run file that the files depend on, beside the texts."""

    @classmethod
    def cached(cls, data: Any) -> Self | None:
        """The corpus that the section `data` describes, if it is whole in the cache; nothing is built or refused.

        None too where it would take a while to find out, from files that nobody has prepared or that are very many.
        """
        try:
            return cls._find(cls._folder(data, cls.open_source(data, looking=True).fingerprint()), verify=False)
        except (UserError, OSError):
            return None

    @classmethod
    def prepare(cls, data: Any, say: LogFn = lambda line: None) -> Self:
        """The corpus that the section `data` describes: from the cache, or built now."""
        source = cls.open_source(data)
        fingerprint = source.fingerprint()
        folder = cls._folder(data, fingerprint)
        if (found := cls._find(folder, say)) is not None:
            return found
        with cache.lock_entry(folder, say):
            if (found := cls._find(folder)) is not None:  # whoever held the lock before may have built it
                return found
            with cache.create_entry(folder) as temporary:
                cls._build(data, source, fingerprint, temporary, say)
            for _ in range(RETRIES):  # where there are no locks another process may just now put its equal there
                with suppress(DamagedEntry):
                    return cls.open(folder)
                time.sleep(RETRY_S)
            return cls.open(folder)

    @classmethod
    def _folder(cls, data: Any, fingerprint: str) -> Path:
        """Named by all that its files depend on."""
        settings = {name: getattr(data, name) for name in cls.settings}
        if data.tokenizer is not None:
            settings["vocab"] = hash_tokenizer(data)
        key = hash_value([FORMAT, fingerprint, *settings.values()])[:16]
        return Path(data.cache.expanduser().absolute() / f"{cls.prefix}{data.source}-{key}")

    @classmethod
    def _find(cls, folder: Path, say: LogFn = lambda line: None, verify: bool = True) -> Self | None:
        """None where there is nothing, or nothing whole."""
        if not folder.exists():
            return None
        try:
            corpus = cls.open(folder)
            if verify:
                corpus.verify()
        except DamagedEntry as damage:
            say(f"corpus: the cached {folder} is damaged ({damage}); building it again")
            return None
        say(f"corpus: {corpus}, from {folder}")
        return corpus

    @classmethod
    def _build(cls, data: Any, source: Any, fingerprint: str, folder: Path, say: LogFn) -> None:
        from paceline.data.corpora import tokenizer

        began_s = time.monotonic()
        how = (
            f"learning a vocabulary of {data.vocab:,} tokens"
            if data.tokenizer is None
            else f"tokenising it with {data.tokenizer}"
        )
        say(f"corpus: reading {data.source}, {how}")
        with tokenizer.use_all_cores():
            built = cls.build(data, source, folder, say)
        _write_meta(folder, {"name": data.source, "fingerprint": fingerprint}, built)
        size = f"{vocabulary_size(built.chosen.tokenizer):,} in the vocabulary"
        for line in (f"{built.summary}, {size} ({time.monotonic() - began_s:.1f} s)", *built.warnings):
            say(f"corpus: {line}")

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map a prepared corpus. `Damaged` says what is wrong with one that is not whole."""
        try:
            meta = _read_meta(folder)
            _check_files(folder, meta)
            facts = meta["vocab"], meta.get("special", 0), meta["fingerprint"]  # learned: token 0
            if [type(fact) for fact in facts] != [int, int, str]:
                raise ValueError(f"{facts} are not those of a vocabulary")
            return cls(folder, *facts, **cls.read_fields(folder, meta))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedEntry(f"{type(error).__name__}: {error}") from None

    def verify(self) -> None:
        """Its files are what was written, and every id is one of the vocabulary; done before the first rank starts."""
        try:
            cache.verify_entry(self.folder, _read_meta(self.folder)["files"])
        except OSError as error:
            raise DamagedEntry(f"{type(error).__name__}: {error}") from None
        for split, ids in self.all_ids().items():
            if ids.size and (most := int(ids.max())) >= self.vocab:
                raise DamagedEntry(f"its {split} split holds token {most:,}, beyond the vocabulary of {self.vocab:,}")

    def all_ids(self) -> Mapping[str, Ids]:
        """The tokens of each split."""
        raise NotImplementedError

    @classmethod
    def build(cls, data: Any, source: Any, folder: Path, say: LogFn) -> BuiltCorpus:
        """Learn a vocabulary, or take the user's, and stream both splits into the folder."""
        raise NotImplementedError

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        """The fields that this kind of corpus adds."""
        raise NotImplementedError

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Turns a new text into the ids that would have been stored."""
        from paceline.data.corpora import tokenizer

        return tokenizer.restore_tokenizer(read_text(self.folder / TOKENIZER))

    def __reduce__(self) -> tuple[Callable[[Path], Self], tuple[Path]]:
        return type(self).open, (self.folder,)  # another process maps the same files instead of copying them


def _write_meta(folder: Path, source: dict[str, str], built: BuiltCorpus) -> None:
    """Write the tokenizer and, last of all, what `TokenisedCorpus.open` checks."""
    files = {writer.path.name: writer.facts for split in built.splits.values() for writer in split.arrays}
    files[TOKENIZER] = write_synced(folder / TOKENIZER, built.chosen.tokenizer.to_str().encode("utf-8"))
    content = "".join(files[name]["sha256"] for name in sorted(files))
    meta = {
        "format": FORMAT,
        "source": source,
        "vocab": vocabulary_size(built.chosen.tokenizer),
        "special": built.chosen.special,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest(),
        **built.meta,
        **{name: split.counts for name, split in built.splits.items()},
        "files": files,
    }
    write_synced(folder / META, json.dumps(add_seal(json.loads(json.dumps(meta))), indent=1).encode())


def _read_meta(folder: Path) -> dict[str, Any]:
    return read_facts(folder / META)


def token_dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocabulary_size(tokenizer) <= 1 << 16 else np.uint32


def limit_rate(say: LogFn) -> LogFn:
    """The same for progress: most lines are left out."""
    said_s = time.monotonic()

    def progress(line: str) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            say(line)

    return progress


def _check_files(folder: Path, meta: dict[str, Any]) -> None:
    """Arrays may be large, so of those only the sizes are compared."""
    for name, facts in meta["files"].items():
        size = (folder / name).stat().st_size
        if size != facts["bytes"]:
            raise DamagedEntry(f"{name} has {size:,} bytes instead of {facts['bytes']:,}")
    if meta["format"] != FORMAT:
        raise DamagedEntry(f"its format is {meta['format']}, not {FORMAT}")
    if hashlib.sha256(read_bytes(folder / TOKENIZER)).hexdigest() != meta["files"][TOKENIZER]["sha256"]:
        raise DamagedEntry(f"{TOKENIZER} was changed")


@dataclass
class HashRange:
    """The hashes of all texts that were added. A text is held out by its hash: equal texts are on the same side."""

    lowest: int = 1 << 64
    highest: int = -1

    def add(self, text: str) -> None:
        value = hash_text(text)
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)

    @property
    def is_empty(self) -> bool:
        return self.highest < 0

    @property
    def is_single(self) -> bool:
        """All texts are equal, so that there is nothing to divide."""
        return self.lowest == self.highest

    def threshold(self, fraction: float) -> int:
        """The hash below which a text is held out, moved as little as it takes for both sides to have one."""
        return min(max(int(fraction * 2**64), self.lowest + 1), self.highest)


VOCABULARY = "vocabulary.json"
CLASSES_FILE = "classes.json"


@dataclass(frozen=True, eq=False)
class Vocabulary:
    folder: Path
    """Where the tokeniser is."""
    size: int
    special: int
    """The id of the token that no text contains, see `TokenisedCorpus`."""
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, corpus: TokenisedCorpus) -> Vocabulary:
        return cls(corpus.folder, corpus.vocab, corpus.special, getattr(corpus, "classes", ()))

    @classmethod
    def open(cls, folder: Path) -> Vocabulary:
        """What `keep` wrote."""
        try:
            classes = json.loads(read_text(folder / CLASSES_FILE)) if (folder / CLASSES_FILE).exists() else []
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or "it is not JSON"
            raise UserError(f"{folder / CLASSES_FILE} cannot be read: {why}") from None
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise UserError(f"{folder / CLASSES_FILE} is damaged: it does not list the names of classes")
        facts = read_json(folder / VOCABULARY)
        size, special = facts.get("size"), facts.get("special")
        if type(size) is not int or type(special) is not int or not 0 <= special < size:
            raise UserError(f"{folder / VOCABULARY} is damaged: its values are not those of a vocabulary")
        return cls(folder, size, special, tuple(classes))

    def copy_tokenizer(self, folder: Path) -> None:
        try:
            write_atomic(folder / TOKENIZER, read_bytes(self.folder / TOKENIZER))
        except OSError as error:
            raise UserError(f"{self.folder / TOKENIZER} cannot be read: {error.strerror}") from None

    def keep(self, folder: Path) -> None:
        """Write it into a folder that needs neither the corpus nor its cache."""
        self.copy_tokenizer(folder)
        if self.classes:
            write_json(folder / CLASSES_FILE, list(self.classes))
        write_json(folder / VOCABULARY, {"size": self.size, "special": self.special})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from paceline.data.corpora import tokenizer

        try:
            return tokenizer.restore_tokenizer(read_text(self.folder / TOKENIZER))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{self.folder / TOKENIZER} cannot be read: {why}") from None

    def encode(self, texts: list[str]) -> EncodedTexts:
        from paceline.data.corpora import tokenizer

        if self.tokenizer.truncation is None:
            raise UserError(f"{self.folder / TOKENIZER} is damaged: it does not say where texts are cut")
        return tokenizer.encode_texts(self.tokenizer, self.special, texts)
