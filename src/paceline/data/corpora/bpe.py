"""Byte-level BPE: a vocabulary learned from the training texts, then texts turned into token ids by the batch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LEARN_TEXTS = 50_000  # the vocabulary is learned from the first texts, up to this many ...
LEARN_CHARACTERS = 64 << 20  # ... and up to this many characters
LONG = 1000  # characters of a word
BLANKS = " \n\t"
_ENDLESS = re.compile("|".join(f"({kind}{{{LONG}}}){kind}+" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))
"""What byte-level BPE takes for one word: a run of letters, of digits, of other signs or of blanks."""
TOKEN_CHARACTERS = 256  # no text has as many in each of its tokens: what lies beyond so many is cut anyway
BATCH_TEXTS = 2_000
BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class Encoded:
    """The tokens of one batch of texts, end to end."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    cut_texts: int
    empty_texts: int


def learn(texts: Iterable[str], vocab: int, max_length: int | None, lowercase: bool, special: str) -> Tokenizer:
    """A tokenizer with at most `vocab` tokens. The bytes are all in it, so no text is out of its reach.

    `special` is token 0, which no text contains. Without `max_length` texts are not cut.
    """
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts), trainer)
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    assert tokenizer.token_to_id(special) == 0
    return load(tokenizer.to_str())


def parsed(serialised: str) -> Tokenizer:
    """From a text that may be anything; ValueError where it is no tokeniser."""
    try:
        return Tokenizer.from_str(serialised)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError((str(error).splitlines() or ["it is no tokenizer.json"])[0][:120]) from None


def load(serialised: str) -> Tokenizer:
    tokenizer = parsed(serialised)
    tokenizer.encode_special_tokens = True  # a text that spells [MASK] is text
    return tokenizer


def adapted(tokenizer: Tokenizer, max_length: int | None, lowercase: bool) -> Tokenizer:
    """A tokeniser of others that cuts texts where ours would, and nothing else: what its file says of that is gone."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if lowercase:
        fold = normalizers.Lowercase()
        own = tokenizer.normalizer
        tokenizer.normalizer = fold if own is None else normalizers.Sequence([fold, own])
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return load(tokenizer.to_str())


def encode(tokenizer: Tokenizer, empty: int, texts: list[str], framed: bool = False) -> Encoded:
    """Token ids of a batch. Every text has at least one token: an empty one has the token `empty`.

    `framed`: with the tokens that the tokeniser puts around a text, such as [CLS] … [SEP].
    """
    assert tokenizer.truncation is not None, "learn() and adapted() set it"
    max_length = tokenizer.truncation["max_length"]
    read = max_length * TOKEN_CHARACTERS
    encodings = tokenizer.encode_batch_fast([text[:read] for text in texts], add_special_tokens=framed)
    cut_texts = sum(len(one) == max_length and bool(one.overflowing) for one in encodings)
    tokens = [one.ids or [empty] for one in encodings]
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ids = np.fromiter(chain.from_iterable(tokens), np.uint32, int(lengths.sum()))
    return Encoded(ids, lengths, cut_texts, empty_texts=sum(not len(one) for one in encodings))


def batches(samples: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """The stream in pieces that are limited in number and in size."""
    batch: list[tuple[str, int]] = []
    characters = 0
    for sample in samples:
        batch.append(sample)
        characters += len(sample[0])
        if len(batch) == BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def all_cores() -> Iterator[None]:
    """Tokenise on every core, and afterwards on one: a process that forks later must not hold such threads.

    The library takes this setting from the environment only. One that the user made is left alone.
    """
    name = "TOKENIZERS_PARALLELISM"
    ours = name not in os.environ
    if ours:
        os.environ[name] = "true"
    try:
        yield
    finally:
        if ours:
            os.environ[name] = "false"


def _first(texts: Iterable[str]) -> Iterator[str]:
    """Learning looks at a word again for every token that it adds, so of a word without end there is the beginning."""
    characters = 0
    for count, text in enumerate(texts):
        if count == LEARN_TEXTS or characters >= LEARN_CHARACTERS:
            return
        characters += len(text)
        yield _ENDLESS.sub(lambda word: word[word.lastindex or 0], text) if _has_long_word(text) else text


def _has_long_word(text: str) -> bool:
    """Cheaply: nearly no text has one."""
    return len(text) > LONG and (max(map(len, text.split()), default=0) > LONG or any(b * LONG in text for b in BLANKS))
