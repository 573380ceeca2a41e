"""Tokenised corpora: a folder of memory-mapped arrays, found in the cache by the hash of its content and settings.

Beside the arrays lie `tokenizer.json` and, written last, `meta.json` with the size and the checksum of every file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.arrays import write_synced
from paceline.data.cache import Damaged, Say
from paceline.data.files import digest_of_value

if TYPE_CHECKING:
    from typing import Self

    from tokenizers import Tokenizer

FORMAT = 1  # raise it when the files of an entry change their meaning
SPLITS = ("train", "test")
TOKENIZER = "tokenizer.json"
PROGRESS_S = 10.0

Ids = NDArray[np.uint16] | NDArray[np.uint32]
FileFacts = dict[str, dict[str, Any]]
"""By name of the file, its "bytes" and its "sha256"."""


class CorpusSettings(Protocol):
    """Fields of the run file that every corpus of texts has."""

    @property
    def source(self) -> str: ...

    path: Path | None
    test_fraction: float
    vocab: int
    limit: int
    cache: Path


@dataclass(frozen=True, eq=False)
class TokenisedCorpus:
    """What all prepared corpora have. `fingerprint` is a hash of their content."""

    folder: Path
    vocab: int  # tokens in the vocabulary; fewer than asked for where the texts are few
    fingerprint: str

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map a prepared corpus. `Damaged` says what is wrong with one that is not whole."""
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            _check(folder, meta)
            return cls(folder, meta["vocab"], meta["fingerprint"], **cls.read_fields(folder, meta))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{type(error).__name__}: {error}") from None

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        """The fields that this kind of corpus adds."""
        raise NotImplementedError

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Turns a new text into the ids that would have been stored."""
        from paceline.data.corpora import bpe

        return bpe.load((self.folder / TOKENIZER).read_text(encoding="utf-8"))

    def __reduce__(self) -> tuple[Callable[[Path], Self], tuple[Path]]:
        return type(self).open, (self.folder,)  # another process maps the same files instead of copying them


def entry_folder(settings: CorpusSettings, prefix: str, *content: object) -> Path:
    """Where a corpus lies in the cache: `content` is all that its files depend on."""
    key = digest_of_value([FORMAT, *content])[:16]
    return settings.cache.expanduser().absolute() / f"{prefix}{settings.source}-{key}"


def write_meta(folder: Path, tokenizer: Tokenizer, files: FileFacts, **facts: Any) -> None:
    """Write the tokenizer and, last of all, what `TokenisedCorpus.open` checks."""
    files = {**files, TOKENIZER: write_synced(folder / TOKENIZER, tokenizer.to_str().encode("utf-8"))}
    content = "".join(files[name]["sha256"] for name in sorted(files))
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    meta = {"format": FORMAT, "vocab": tokenizer.get_vocab_size(), "fingerprint": fingerprint, **facts, "files": files}
    write_synced(folder / "meta.json", json.dumps(meta, indent=1).encode())


def token_dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


def now_and_then(say: Say) -> Say:
    """The same for progress: most lines are left out."""
    said_s = time.monotonic()

    def progress(line: str) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            say(line)

    return progress


def _check(folder: Path, meta: dict[str, Any]) -> None:
    """Arrays may be large, so of those only the sizes are compared."""
    for name, facts in meta["files"].items():
        size = (folder / name).stat().st_size
        if size != facts["bytes"]:
            raise Damaged(f"{name} has {size:,} bytes instead of {facts['bytes']:,}")
    if meta["format"] != FORMAT:
        raise Damaged(f"its format is {meta['format']}, not {FORMAT}")
    if hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest() != meta["files"][TOKENIZER]["sha256"]:
        raise Damaged(f"{TOKENIZER} was changed")
