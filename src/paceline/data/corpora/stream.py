"""A corpus for language models: the tokens of all documents of a split end to end, in one memory-mapped array.

Documents are separated by an end token, and one stands before the first, so that every token of the text has something
before it. `prepare` tokenises once, streaming to disk, and afterwards finds the corpus by the hash of its content.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.data import cache as shelf
from paceline.data.arrays import ArrayWriter, map_array, write_synced
from paceline.data.corpora.documents import Documents, Piece, open_documents
from paceline.data.corpora.tokens import PROGRESS_S, SPLITS, Damaged
from paceline.errors import UserError
from paceline.workloads.lm.sections import LMData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1  # raise it when the files of an entry change their meaning
END = "[END]"
END_ID = 0
BATCH_PIECES = 256

Say = Callable[[str], None]
Ids = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TokenStreams:
    """A prepared corpus. `fingerprint` is a hash of the tokens themselves."""

    folder: Path
    vocab: int  # tokens in the vocabulary; fewer than asked for where the texts are few
    fingerprint: str
    train: Ids
    test: Ids

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from paceline.data.corpora import bpe

        return bpe.load((self.folder / "tokenizer.json").read_text(encoding="utf-8"))

    def __reduce__(self) -> tuple[Callable[[Path], TokenStreams], tuple[Path]]:
        return open_streams, (self.folder,)  # another process maps the same files instead of copying them


def find(data: LMData) -> TokenStreams | None:
    """The tokenised corpus that `data` describes, if it is in the cache; nothing is built."""
    return _cached(_folder(data, open_documents(data).fingerprint()), lambda line: None)


def _folder(data: LMData, fingerprint: str) -> Path:
    key = hashlib.sha256(json.dumps([FORMAT, fingerprint, data.vocab]).encode()).hexdigest()[:16]
    return data.cache.expanduser().absolute() / f"lm-{data.source}-{key}"


def prepare(data: LMData, say: Say) -> TokenStreams:
    """The tokenised corpus that `data` describes: from the cache, or built now."""
    documents = open_documents(data)
    fingerprint = documents.fingerprint()
    folder = _folder(data, fingerprint)
    streams = _cached(folder, say)
    if streams is not None:
        return streams
    with shelf.exclusive(folder, say):
        streams = _cached(folder, lambda line: None)  # whoever held the lock before may have built it
        if streams is None:
            with shelf.new_entry(folder) as temporary:
                _build(temporary, data, documents, fingerprint, say)
            streams = open_streams(folder)
    return streams


def open_streams(folder: Path) -> TokenStreams:
    """Map a prepared corpus. `Damaged` says what is wrong with one that is not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, facts in meta["files"].items():
            size = (folder / name).stat().st_size
            if size != facts["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes instead of {facts['bytes']:,}")
        if meta["format"] != FORMAT:
            raise Damaged(f"its format is {meta['format']}, not {FORMAT}")
        train, test = (map_array(folder / f"{split}.npy") for split in SPLITS)
        return TokenStreams(folder, meta["vocab"], meta["fingerprint"], train, test)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None


def _cached(folder: Path, say: Say) -> TokenStreams | None:
    if not folder.exists():
        return None
    try:
        streams = open_streams(folder)
    except Damaged as damage:
        say(f"corpus: the cached {folder} is damaged ({damage}); building it again")
        return None
    say(f"corpus: {len(streams.train):,} training and {len(streams.test):,} test tokens, from {folder}")
    return streams


def _build(folder: Path, data: LMData, documents: Documents, fingerprint: str, say: Say) -> None:
    from paceline.data.corpora import bpe

    began_s = time.monotonic()
    say(f"corpus: reading {data.source}, learning a vocabulary of {data.vocab:,} tokens")
    with bpe.all_cores():
        train_texts = (piece.text for piece in documents.stream() if not piece.held_out)
        tokenizer = bpe.learn(train_texts, data.vocab, max_length=None, lowercase=False, special=END)
        facts, files = _write(folder, documents.stream(), tokenizer, say)
    files["tokenizer.json"] = write_synced(folder / "tokenizer.json", tokenizer.to_str().encode("utf-8"))
    content = "".join(files[name]["sha256"] for name in sorted(files))
    meta = {
        "format": FORMAT,
        "source": {"name": data.source, "fingerprint": fingerprint},
        "vocab": tokenizer.get_vocab_size(),
        "fingerprint": hashlib.sha256(content.encode()).hexdigest(),
        **facts,
        "files": files,
    }
    write_synced(folder / "meta.json", json.dumps(meta, indent=1).encode())
    took_s = time.monotonic() - began_s
    train, test = facts["train"], facts["test"]
    say(
        f"corpus: {train['tokens']:,} training tokens in {train['documents']:,} documents and {test['tokens']:,} test "
        f"tokens in {test['documents']:,}, {meta['vocab']:,} in the vocabulary ({took_s:.1f} s)"
    )


def _write(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, say: Say
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stream both splits to disk: (counts by split, facts about each file)."""
    kind = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    documents = [0, 0]
    said_s = time.monotonic()
    with ExitStack() as open_files:
        writers = [open_files.enter_context(ArrayWriter(folder / f"{split}.npy", kind)) for split in SPLITS]
        for writer in writers:
            writer.append(np.full(1, END_ID, kind))
        for batch in _batches(pieces):
            encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            tokens: list[list[list[int]]] = [[], []]
            for piece, encoding in zip(batch, encodings, strict=True):
                tokens[piece.held_out] += [encoding.ids, [END_ID]] if piece.ends else [encoding.ids]
                documents[piece.held_out] += piece.ends
            for writer, lists in zip(writers, tokens, strict=True):
                writer.append(np.fromiter(chain.from_iterable(lists), kind))
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                say(f"corpus: {writers[0].length:,} training tokens written")
        for split, writer in zip(SPLITS, writers, strict=True):
            if writer.length < 2:
                raise UserError(f"the {split} split has no text; give more, or another data.test_fraction")
    facts = {
        split: {"tokens": writer.length, "documents": count}
        for split, writer, count in zip(SPLITS, writers, documents, strict=True)
    }
    return facts, {writer.path.name: writer.facts for writer in writers}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces are limited in size, docstrings are short: a number of them is limited enough."""
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == BATCH_PIECES:
            yield batch
            batch = []
    if batch:
        yield batch
