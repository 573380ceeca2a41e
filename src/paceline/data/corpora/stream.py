"""A corpus for language models: the tokens of all documents of a split end to end, in one memory-mapped array.

Documents are separated by an end token, and one stands before the first, so that every token of the text has something
before it. They are tokenised once, streaming to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.cache import ArrayWriter, Say, map_array
from paceline.data.corpora.documents import DocumentPart, DocumentSource, open_documents
from paceline.data.corpora.own_tokenizer import END, Chosen, tokenizer_of
from paceline.data.corpora.tokenised import (
    SPLITS,
    Built,
    CorpusSettings,
    Damaged,
    Ids,
    Split,
    TokenisedCorpus,
    now_and_then,
    token_dtype,
)
from paceline.errors import UserError

BATCH_PARTS = 256
"""Parts are limited in size, docstrings are short: a number of them is limited enough."""


@dataclass(frozen=True, eq=False)
class TokenStreams(TokenisedCorpus):
    train: Ids
    test: Ids
    open_source = staticmethod(open_documents)
    prefix = "lm-"
    settings = ("vocab",)

    @classmethod
    def build(cls, data: CorpusSettings, source: DocumentSource, folder: Path, say: Say) -> Built:
        train_texts = (part.text for part in source.parts() if not part.held_out)
        chosen = tokenizer_of(data, train_texts, END, None, False, say)
        splits = _write(folder, source.parts(), chosen, say)
        train, test = (splits[name].counts for name in SPLITS)
        summary = (
            f"{train['tokens']:,} training tokens in {train['documents']:,} documents and "
            f"{test['tokens']:,} test tokens in {test['documents']:,}"
        )
        return Built(chosen, splits, summary)

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        splits = {split: map_array(folder / f"{split}.npy") for split in SPLITS}
        for split, ids in splits.items():
            if ids.shape != (meta[split]["tokens"],):
                raise Damaged(f"the {split} split has {ids.size:,} tokens instead of {meta[split]['tokens']:,}")
        return splits

    def all_ids(self) -> Mapping[str, Ids]:
        return {"train": self.train, "test": self.test}

    def __str__(self) -> str:
        return f"{len(self.train):,} training and {len(self.test):,} test tokens"


def _write(folder: Path, parts: Iterator[DocumentPart], chosen: Chosen, say: Say) -> dict[str, Split]:
    """Stream both splits to disk."""
    tokenizer, end = chosen
    dtype = token_dtype(tokenizer)
    documents = [0, 0]
    say_progress = now_and_then(say)
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
            say_progress(f"corpus: {writers[0].length:,} training tokens written")
        for split, writer in zip(SPLITS, writers, strict=True):
            if writer.length < 2:
                raise UserError(f"the {split} split has no text; give more, or another data.test_fraction")
    return {
        split: Split({"tokens": writer.length, "documents": count}, [writer])
        for split, writer, count in zip(SPLITS, writers, documents, strict=True)
    }
