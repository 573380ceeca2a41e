"""The texts as the model reads them: token ids in one memory-mapped array per split.

`prepare` tokenises a source once, streaming it to disk, and afterwards finds it there by the hash of its content and
settings. `Tokens.gather` then assembles a batch in a few vectorised steps.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.data import cache as shelf
from paceline.data.arrays import ArrayWriter, map_array, write_synced
from paceline.data.corpora.sources import Sample, Source, open_source
from paceline.errors import UserError
from paceline.workloads.classifier.sections import TextData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1  # raise it when the files of an entry change their meaning
SPLITS = ("train", "test")
PROGRESS_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Tokens:
    """One split: the tokens of all texts end to end, where each text begins, and the labels. Read-only."""

    ids: NDArray[np.uint16] | NDArray[np.uint32]
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
        samples = np.asarray(samples)
        starts = self.offsets[samples]
        lengths = self.offsets[samples + 1] - starts
        ends = np.cumsum(lengths)
        if not ends.size:
            return np.empty(0, np.int64)
        # Token j of the batch lies at j + (start of its text in the corpus - start of its text in the batch).
        positions = np.repeat(starts - ends + lengths, lengths)
        positions += np.arange(ends[-1])
        return self.ids[positions].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared corpus. `fingerprint` is a hash of the tokens and labels themselves."""

    folder: Path
    classes: tuple[str, ...]
    vocab: int  # tokens in the vocabulary; fewer than asked for where the texts are few
    fingerprint: str
    train: Tokens
    test: Tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Turns a new text into the ids that `prepare` would have stored."""
        from paceline.data.corpora import bpe

        return bpe.load((self.folder / "tokenizer.json").read_text(encoding="utf-8"))

    def __reduce__(self) -> tuple[Callable[[Path], Corpus], tuple[Path]]:
        return open_corpus, (self.folder,)  # another process maps the same files instead of copying them


def find(data: TextData) -> Corpus | None:
    """The tokenised corpus that `data` describes, if it is in the cache; nothing is built."""
    folder = data.cache.expanduser().absolute() / f"{data.source}-{_key(data, open_source(data).fingerprint())}"
    return _cached(folder, lambda line: None)


def prepare(data: TextData, say: Say | None = None) -> Corpus:
    """The tokenised corpus that `data` describes: from the cache, or built now."""
    say = say or (lambda line: None)
    source = open_source(data)
    fingerprint = source.fingerprint()
    folder = data.cache.expanduser().absolute() / f"{data.source}-{_key(data, fingerprint)}"
    corpus = _cached(folder, say)
    if corpus is not None:
        return corpus
    with shelf.exclusive(folder, say):
        corpus = _cached(folder, lambda line: None)  # whoever held the lock before may have built it
        if corpus is None:
            with shelf.new_entry(folder) as temporary:
                _build(temporary, data, source, fingerprint, say)
            corpus = _open_built(folder)
    return corpus


def _open_built(folder: Path) -> Corpus:
    """Where there are no locks another process may put its equal in this place just now: look again."""
    for _ in range(20):
        try:
            return open_corpus(folder)
        except Damaged:
            time.sleep(0.1)
    return open_corpus(folder)


def open_corpus(folder: Path) -> Corpus:
    """Map a prepared corpus. `Damaged` says what is wrong with one that is not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, facts in meta["files"].items():
            size = (folder / name).stat().st_size
            if size != facts["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes instead of {facts['bytes']:,}")
        if meta["format"] != FORMAT:
            raise Damaged(f"its format is {meta['format']}, not {FORMAT}")
        tokenizer = (folder / "tokenizer.json").read_bytes()
        if hashlib.sha256(tokenizer).hexdigest() != meta["files"]["tokenizer.json"]["sha256"]:
            raise Damaged("tokenizer.json was changed")
        train, test = (_open_tokens(folder, split, meta[split]) for split in SPLITS)
        return Corpus(folder, tuple(meta["classes"]), meta["vocab"], meta["fingerprint"], train, test)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None


class Damaged(Exception):
    """A cache entry that is not whole: it is built again."""


def _open_tokens(folder: Path, split: str, facts: dict[str, int]) -> Tokens:
    ids, offsets, labels = (map_array(folder / f"{split}.{part}.npy") for part in ("ids", "offsets", "labels"))
    expected = (facts["tokens"],), (facts["samples"] + 1,), (facts["samples"],)
    if (ids.shape, offsets.shape, labels.shape) != expected or offsets[0] != 0 or offsets[-1] != ids.size:
        raise Damaged(f"the arrays of the {split} split do not fit together")
    return Tokens(ids, offsets, labels)


def _cached(folder: Path, say: Say) -> Corpus | None:
    if not folder.exists():
        return None
    try:
        corpus = open_corpus(folder)
    except Damaged as damage:
        say(f"corpus: the cached {folder} is damaged ({damage}); building it again")
        return None
    say(
        f"corpus: {len(corpus.train):,} training and {len(corpus.test):,} test texts in {len(corpus.classes)} classes, "
        f"from {folder}"
    )
    return corpus


def _key(data: TextData, fingerprint: str) -> str:
    parts = [FORMAT, fingerprint, data.vocab, data.max_length, data.lowercase]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _build(folder: Path, data: TextData, source: Source, fingerprint: str, say: Say) -> None:
    from paceline.data.corpora import bpe

    began_s = time.monotonic()
    say(f"corpus: reading {data.source}, learning a vocabulary of {data.vocab:,} tokens")
    with bpe.all_cores():
        classes = source.classes
        tokenizer = bpe.learn((text for text, _ in source.train()), data.vocab, data.max_length, data.lowercase)
        vocab = tokenizer.get_vocab_size()
        facts: dict[str, Any] = {}
        files = {"tokenizer.json": write_synced(folder / "tokenizer.json", tokenizer.to_str().encode("utf-8"))}
        for split, samples in zip(SPLITS, (source.train(), source.test()), strict=True):
            facts[split], arrays = _write_split(folder, split, samples, tokenizer, len(classes), say)
            files.update(arrays)
    content = "".join(files[name]["sha256"] for name in sorted(files))
    meta = {
        "format": FORMAT,
        "source": {"name": data.source, "fingerprint": fingerprint},
        "settings": {"vocab": data.vocab, "max_length": data.max_length, "lowercase": data.lowercase},
        "classes": classes,
        "vocab": vocab,
        "fingerprint": hashlib.sha256(content.encode()).hexdigest(),
        **facts,
        "files": files,
    }
    write_synced(folder / "meta.json", json.dumps(meta, indent=1).encode())
    _say_facts(facts, classes, vocab, data, time.monotonic() - began_s, say)


def _write_split(
    folder: Path, split: str, samples: Iterator[Sample], tokenizer: Tokenizer, classes: int, say: Say
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Stream one split to disk: (counts, facts about each file)."""
    from paceline.data.corpora import bpe

    narrow = tokenizer.get_vocab_size() <= 1 << 16
    n_samples = n_tokens = cut = empty = 0
    per_class = np.zeros(classes, np.int64)
    said_s = time.monotonic()
    with (
        ArrayWriter(folder / f"{split}.ids.npy", np.uint16 if narrow else np.uint32) as ids,
        ArrayWriter(folder / f"{split}.offsets.npy", np.int64) as offsets,
        ArrayWriter(folder / f"{split}.labels.npy", np.int64) as labels,
    ):
        offsets.append(np.zeros(1, np.int64))
        for texts, batch_labels in bpe.batches(samples):
            batch = bpe.encode(tokenizer, texts)
            ids.append(batch.ids)
            offsets.append(n_tokens + np.cumsum(batch.lengths))
            labels.append(np.array(batch_labels, np.int64))
            per_class += np.bincount(batch_labels, minlength=classes)
            n_samples += len(texts)
            n_tokens += len(batch.ids)
            cut += batch.cut_texts
            empty += batch.empty_texts
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                say(f"corpus: {n_samples:,} {split} texts tokenised, {n_tokens:,} tokens")
    if not n_samples:
        raise UserError(f"the {split} split has no rows; give more rows, or another data.test_fraction")
    counts = {"samples": n_samples, "tokens": n_tokens, "cut": cut, "empty": empty, "per_class": per_class.tolist()}
    return counts, {writer.path.name: writer.facts for writer in (ids, offsets, labels)}


def _say_facts(
    facts: dict[str, Any], classes: tuple[str, ...], vocab: int, data: TextData, took_s: float, say: Say
) -> None:
    train, test = facts["train"], facts["test"]
    say(
        f"corpus: {train['samples']:,} training and {test['samples']:,} test texts in {len(classes)} classes, "
        f"{train['tokens'] / train['samples']:.1f} tokens each on average, {vocab:,} in the vocabulary ({took_s:.1f} s)"
    )
    for split in SPLITS:
        counts = facts[split]
        if counts["cut"]:
            share = counts["cut"] / counts["samples"]
            say(f"corpus: {counts['cut']:,} {split} texts ({share:.1%}) were cut at data.max_length={data.max_length}")
        if counts["empty"]:
            say(f"corpus: {counts['empty']:,} {split} texts are empty")
        missing = [name for name, n in zip(classes, counts["per_class"], strict=True) if not n]
        if missing:
            say(f"corpus: WARNING: no {split} text has the label {', '.join(missing[:12])}")
