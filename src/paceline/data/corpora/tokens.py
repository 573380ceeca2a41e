"""Labelled texts as a classifier reads them: token ids in one memory-mapped array per split.

A source is tokenised once, streaming it to disk. `Tokens.gather` then assembles a batch in a few vectorised
steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.cache import ArrayWriter, Say, map_array
from paceline.data.corpora.own_tokenizer import MASK, Chosen, tokenizer_of
from paceline.data.corpora.sources import LabelledTextSettings, Sample, Source, open_source
from paceline.data.corpora.tokenised import (
    SPLITS,
    Built,
    Damaged,
    Ids,
    Split,
    TokenisedCorpus,
    now_and_then,
    token_dtype,
)
from paceline.errors import UserError


@dataclass(frozen=True, eq=False)
class Tokens:
    """One split: the tokens of all texts end to end, where each text begins, and the labels. Read-only."""

    ids: Ids
    offsets: NDArray[np.int64]  # n + 1: text i is ids[offsets[i]:offsets[i + 1]]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each of these samples."""
        samples = np.asarray(samples)
        return self.offsets[samples + 1] - self.offsets[samples]

    def gather(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of these samples, end to end and in their order."""
        starts, lengths = self.offsets[np.asarray(samples)], self.lengths(samples)
        ends = np.cumsum(lengths)
        if not ends.size:
            return np.empty(0, np.int64)
        # Token j of the batch lies at j + (start of its text in the corpus - start of its text in the batch).
        positions = np.repeat(starts - ends + lengths, lengths)
        positions += np.arange(ends[-1])
        return self.ids[positions].astype(np.int64)


@dataclass(frozen=True, eq=False)
class LabelledCorpus(TokenisedCorpus):
    classes: tuple[str, ...]
    train: Tokens
    test: Tokens
    open_source = staticmethod(open_source)
    prefix = ""
    framed: ClassVar[bool] = False
    """With the tokens that a tokeniser puts around a text."""
    settings = ("vocab", "max_length", "lowercase")

    @classmethod
    def build(cls, data: LabelledTextSettings, source: Source, folder: Path, say: Say) -> Built:
        classes = source.classes()
        texts = (text for text, _ in source.train())
        chosen = tokenizer_of(data, texts, MASK, data.max_length, data.lowercase, say)
        streams = {"train": source.train(), "test": source.test()}
        splits = {name: _write(folder, name, streams[name], chosen, len(classes), say, cls.framed) for name in SPLITS}
        train, test = (splits[name].counts for name in SPLITS)
        summary = (
            f"{train['samples']:,} training and {test['samples']:,} test texts in {len(classes)} classes, "
            f"{train['tokens'] / train['samples']:.1f} tokens each on average"
        )
        odd = [line for name in SPLITS for line in _oddities(name, splits[name].counts, classes, data.max_length)]
        settings = {name: getattr(data, name) for name in cls.settings}
        return Built(chosen, splits, summary, odd, {"settings": settings, "classes": classes})

    @classmethod
    def read_fields(cls, folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
        splits = {split: _open_split(folder, split, meta[split]) for split in SPLITS}
        if not all(isinstance(name, str) for name in meta["classes"]):
            raise ValueError("its classes have no names")
        return {"classes": tuple(meta["classes"]), **splits}

    def all_ids(self) -> Mapping[str, Ids]:
        return {"train": self.train.ids, "test": self.test.ids}

    def __str__(self) -> str:
        return f"{len(self.train):,} training and {len(self.test):,} test texts in {len(self.classes)} classes"


def _open_split(folder: Path, split: str, facts: dict[str, int]) -> Tokens:
    ids, offsets, labels = (map_array(folder / f"{split}.{part}.npy") for part in ("ids", "offsets", "labels"))
    expected = (facts["tokens"],), (facts["samples"] + 1,), (facts["samples"],)
    if (ids.shape, offsets.shape, labels.shape) != expected or offsets[0] != 0 or offsets[-1] != ids.size:
        raise Damaged(f"the arrays of the {split} split do not fit together")
    return Tokens(ids, offsets, labels)


def _write(
    folder: Path, split: str, samples: Iterator[Sample], chosen: Chosen, classes: int, say: Say, framed: bool
) -> Split:
    """Stream one split to disk."""
    from paceline.data.corpora import bpe

    cut = empty = 0
    per_class = np.zeros(classes, np.int64)
    say_progress = now_and_then(say)
    with (
        ArrayWriter(folder / f"{split}.ids.npy", token_dtype(chosen.tokenizer)) as ids,
        ArrayWriter(folder / f"{split}.offsets.npy", np.int64) as offsets,
        ArrayWriter(folder / f"{split}.labels.npy", np.int64) as labels,
    ):
        offsets.append(np.zeros(1, np.int64))
        for some in bpe.batches(samples):
            texts, batch_labels = [text for text, _ in some], [label for _, label in some]
            batch = bpe.encode(*chosen, texts, framed)
            offsets.append(ids.length + np.cumsum(batch.lengths))
            ids.append(batch.ids)
            labels.append(np.array(batch_labels, np.int64))
            per_class += np.bincount(batch_labels, minlength=classes)
            cut += batch.cut_texts
            empty += batch.empty_texts
            say_progress(f"corpus: {labels.length:,} {split} texts tokenised, {ids.length:,} tokens")
    if not labels.length:
        raise UserError(f"the {split} split has no rows; give more rows, or another data.test_fraction")
    counts = {"samples": labels.length, "tokens": ids.length, "cut": cut, "empty": empty}
    return Split({**counts, "per_class": per_class.tolist()}, (ids, offsets, labels))


def _oddities(split: str, counts: dict[str, Any], classes: tuple[str, ...], max_length: int) -> Iterator[str]:
    if counts["cut"]:
        share = counts["cut"] / counts["samples"]
        yield f"{counts['cut']:,} {split} texts ({share:.1%}) were cut at data.max_length={max_length}"
    if counts["empty"]:
        yield f"{counts['empty']:,} {split} texts are empty"
    missing = [name for name, n in zip(classes, counts["per_class"], strict=True) if not n]
    if missing:
        yield f"WARNING: no {split} text has the label {', '.join(missing[:12])}"
