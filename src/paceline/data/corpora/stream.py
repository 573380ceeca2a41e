"""A corpus for language models: the tokens of all documents of a split end to end, in one memory-mapped array.

Documents are separated by an end token, and one stands before the first, so that every token of the text has something
before it. `prepare` tokenises once, streaming to disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.arrays import ArrayWriter, map_array
from paceline.data.cache import Say
from paceline.data.corpora.documents import DocumentPart, DocumentSource, open_documents
from paceline.data.corpora.tokenised import (
    SPLITS,
    CorpusSettings,
    Damaged,
    Ids,
    Split,
    TokenisedCorpus,
    entry_folder,
    now_and_then,
    token_dtype,
    write_meta,
)
from paceline.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "[END]"
END_ID = 0
BATCH_PARTS = 256
"""Parts are limited in size, docstrings are short: a number of them is limited enough."""


@dataclass(frozen=True, eq=False)
class TokenStreams(TokenisedCorpus):
    train: Ids
    test: Ids

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        splits = {split: map_array(folder / f"{split}.npy") for split in SPLITS}
        for split, ids in splits.items():
            if ids.shape != (meta[split]["tokens"],):
                raise Damaged(f"the {split} split has {ids.size:,} tokens instead of {meta[split]['tokens']:,}")
        return splits

    def __str__(self) -> str:
        return f"{len(self.train):,} training and {len(self.test):,} test tokens"


def find(data: CorpusSettings) -> TokenStreams | None:
    """The tokenised corpus that `data` describes, if it is in the cache; nothing is built."""
    return TokenStreams.find(_folder(data, open_documents(data).fingerprint()))


def prepare(data: CorpusSettings, say: Say = lambda line: None) -> TokenStreams:
    """The tokenised corpus that `data` describes: from the cache, or built now."""
    documents = open_documents(data)
    fingerprint = documents.fingerprint()
    build = partial(_build, data, documents, fingerprint, say)
    return TokenStreams.find_or_build(_folder(data, fingerprint), build, say)


def _folder(data: CorpusSettings, fingerprint: str) -> Path:
    return entry_folder(data, "lm-", fingerprint, data.vocab)


def _build(data: CorpusSettings, documents: DocumentSource, fingerprint: str, say: Say, folder: Path) -> None:
    from paceline.data.corpora import bpe

    began_s = time.monotonic()
    say(f"corpus: reading {data.source}, learning a vocabulary of {data.vocab:,} tokens")
    with bpe.all_cores():
        train_texts = (part.text for part in documents.parts() if not part.held_out)
        tokenizer = bpe.learn(train_texts, data.vocab, max_length=None, lowercase=False, special=END)
        splits = _write(folder, documents.parts(), tokenizer, say)
    source_facts = {"name": data.source, "fingerprint": fingerprint}
    write_meta(folder, source_facts, tokenizer, splits)
    train, test = (splits[name].counts for name in SPLITS)
    say(
        f"corpus: {train['tokens']:,} training tokens in {train['documents']:,} documents and {test['tokens']:,} test "
        f"tokens in {test['documents']:,}, {tokenizer.get_vocab_size():,} in the vocabulary "
        f"({time.monotonic() - began_s:.1f} s)"
    )


def _write(folder: Path, parts: Iterator[DocumentPart], tokenizer: Tokenizer, say: Say) -> dict[str, Split]:
    """Stream both splits to disk."""
    dtype = token_dtype(tokenizer)
    documents = [0, 0]
    say_progress = now_and_then(say)
    with ExitStack() as open_files:
        writers = [open_files.enter_context(ArrayWriter(folder / f"{split}.npy", dtype)) for split in SPLITS]
        for writer in writers:
            writer.append(np.full(1, END_ID, dtype))
        while batch := list(islice(parts, BATCH_PARTS)):
            encodings = tokenizer.encode_batch_fast([part.text for part in batch], add_special_tokens=False)
            tokens: list[list[list[int]]] = [[], []]
            for part, encoding in zip(batch, encodings, strict=True):
                tokens[part.held_out] += [encoding.ids, [END_ID]] if part.ends else [encoding.ids]
                documents[part.held_out] += part.ends
            for writer, lists in zip(writers, tokens, strict=True):
                writer.append(np.fromiter(chain.from_iterable(lists), dtype))
            say_progress(f"corpus: {writers[0].length:,} training tokens written")
        for split, writer in zip(SPLITS, writers, strict=True):
            if writer.length < 2:
                raise UserError(f"the {split} split has no text; give more, or another data.test_fraction")
    return {
        split: Split({"tokens": writer.length, "documents": count}, [writer])
        for split, writer, count in zip(SPLITS, writers, documents, strict=True)
    }
