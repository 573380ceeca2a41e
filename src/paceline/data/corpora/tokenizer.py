"""Byte-level BPE tokenizers: learned from the training texts, or read from a tokenizer.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.data.files import hash_files, missing_path_error
from paceline.errors import UserError
from paceline.io.safe_open import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


LEARN_TEXTS = 50_000  # the vocabulary is learned from the first texts, up to this many ...
LEARN_CHARACTERS = 64 << 20  # ... and up to this many characters
LONG_WORD_CHARACTERS = 1000  # characters of a word
BLANKS = " \n\t"
_ENDLESS = re.compile(
    "|".join(f"({kind}{{{LONG_WORD_CHARACTERS}}}){kind}+" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s"))
)
"""What byte-level BPE takes for one word: a run of letters, of digits, of other signs or of blanks."""
TOKEN_CHARACTERS = 256  # no text has as many in each of its tokens: what lies beyond so many is cut anyway
BATCH_TEXTS = 2_000
BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class EncodedTexts:
    """The tokens of one batch of texts, end to end."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    cut_texts: int
    empty_texts: int


def learn_bpe(texts: Iterable[str], vocab: int, max_length: int | None, lowercase: bool, special: str) -> Tokenizer:
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
    tokenizer.train_from_iterator(_take_first(texts), trainer)
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    assert tokenizer.token_to_id(special) == 0
    return restore_tokenizer(tokenizer.to_str())


def parse_tokenizer(serialised: str) -> Tokenizer:
    """From a text that may be anything; ValueError where it is no tokeniser."""
    try:
        return Tokenizer.from_str(serialised)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError((str(error).splitlines() or ["it is no tokenizer.json"])[0][:120]) from None


def restore_tokenizer(serialised: str) -> Tokenizer:
    tokenizer = parse_tokenizer(serialised)
    tokenizer.encode_special_tokens = True  # a text that spells [MASK] is text
    return tokenizer


def adapt_tokenizer(tokenizer: Tokenizer, max_length: int | None, lowercase: bool) -> Tokenizer:
    """A tokeniser of others that cuts texts where ours would, and nothing else: what its file says of that is gone."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if lowercase:
        fold = normalizers.Lowercase()
        own = tokenizer.normalizer
        tokenizer.normalizer = fold if own is None else normalizers.Sequence([fold, own])
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return restore_tokenizer(tokenizer.to_str())


def encode_texts(tokenizer: Tokenizer, empty: int, texts: list[str], framed: bool = False) -> EncodedTexts:
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
    return EncodedTexts(ids, lengths, cut_texts, empty_texts=sum(not len(one) for one in encodings))


def group_texts(samples: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
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
def use_all_cores() -> Iterator[None]:
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


def _take_first(texts: Iterable[str]) -> Iterator[str]:
    """Learning looks at a word again for every token that it adds, so of a word without end there is the beginning."""
    characters = 0
    for count, text in enumerate(texts):
        if count == LEARN_TEXTS or characters >= LEARN_CHARACTERS:
            return
        characters += len(text)
        yield _ENDLESS.sub(lambda word: word[word.lastindex or 0], text) if _has_long_word(text) else text


def _has_long_word(text: str) -> bool:
    """Cheaply: nearly no text has one."""
    return len(text) > LONG_WORD_CHARACTERS and (
        max(map(len, text.split()), default=0) > LONG_WORD_CHARACTERS
        or any(b * LONG_WORD_CHARACTERS in text for b in BLANKS)
    )


BUILT_BYTES = 8 << 20
"""Of a tokenizer.json that a plan builds the tokeniser of; of a longer one it reads the ids alone."""
MAX_TOKENIZER_BYTES, MAX_TOKENIZER_ENTRIES = 1 << 26, 1_000_000
"""Of any tokenizer.json, and tokens and merges in it; the largest that people use have 35 MB and 800,000."""


@dataclass(frozen=True)
class SpecialToken:
    """A token that no text contains: what it is for, and its usual names, the first one in a learned vocabulary."""

    purpose: str
    names: tuple[str, ...]
    instead: tuple[str, ...] = ()
    """Names of others that can do the same."""


MASK = SpecialToken(
    "hides a word and stands for an empty text",
    ("[MASK]", "<mask>", "<|mask|>"),
    ("[UNK]", "<unk>", "[PAD]", "<pad>", "<|endoftext|>", "</s>", "<eos>"),
)
END = SpecialToken(
    "ends a document",
    ("[END]", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]"),
    ("[SEP]", "<sep>"),
)


class ChosenTokenizer(NamedTuple):
    """A tokeniser, and the id of the special token that its corpus needs."""

    tokenizer: Tokenizer
    special: int


def load_tokenizer(
    data: Any,
    texts: Iterable[str],
    special: SpecialToken,
    max_length: int | None,
    lowercase: bool,
    say: Callable[..., None],
) -> ChosenTokenizer:
    """The tokeniser that the section `data` names or, without one, one that is learned."""

    if data.tokenizer is None:
        return ChosenTokenizer(learn_bpe(texts, data.vocab, max_length, lowercase, special.names[0]), 0)
    tokenizer = read_tokenizer(data.tokenizer)
    token, number = _find_special(tokenizer, special, data.tokenizer)
    if token in special.instead:
        say(f"corpus: data.tokenizer has no {special.names[0]}: what {special.purpose} is its {token}")
    return ChosenTokenizer(adapt_tokenizer(tokenizer, max_length, lowercase), number)


def read_tokenizer(path: Path) -> Tokenizer:
    """From a file that may be anything; one line says what is wrong with it."""

    given = f"data.tokenizer={path}"
    if path.is_dir():
        raise UserError(f"{given}: this is a folder; type  data.tokenizer={path / 'tokenizer.json'}")
    if not path.exists():
        raise missing_path_error(path, "data.tokenizer", "file")
    try:
        tokenizer = parse_tokenizer(_read_tokenizer_text(path))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(
            f"{given}: this is not a tokenizer.json ({error}); one is written by  tokenizer.save('tokenizer.json')  of "
            "the library tokenizers, or lies in the folder of a Hugging Face model"
        ) from None
    if not tokenizer.get_vocab_size():
        raise UserError(f"{given}: its vocabulary is empty")
    return tokenizer


def hash_tokenizer(data: Any) -> str:
    """What the key of a cache needs to know of it."""
    if not data.tokenizer.is_file() or data.tokenizer.stat().st_size > MAX_TOKENIZER_BYTES:
        read_tokenizer(data.tokenizer)  # says why not
    return hash_files([data.tokenizer])


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the highest id: there may be holes below it."""
    return int(max(tokenizer.get_vocab().values())) + 1


def estimate_vocabulary_size(data: Any) -> int:
    """Of texts that are not tokenised yet; a learned one may turn out smaller. A large tokeniser is not built."""
    if data.tokenizer is None:
        return int(data.vocab)
    if data.tokenizer.is_file() and data.tokenizer.stat().st_size > BUILT_BYTES:
        return _count_ids(data.tokenizer)
    return vocabulary_size(read_tokenizer(data.tokenizer))


def _count_ids(path: Path) -> int:
    """One more than the highest id that the file of a tokeniser mentions."""
    given = f"data.tokenizer={path}"
    try:
        content = json.loads(_read_tokenizer_text(path))
        vocab, added = content["model"]["vocab"], content.get("added_tokens", ())
        known = len(vocab) if isinstance(vocab, list) else 1 + max(vocab.values())
        return int(max(known, *(1 + token["id"] for token in added), 1))
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{given}: this is not a tokenizer.json: its vocabulary cannot be read") from None


def _read_tokenizer_text(path: Path) -> str:
    text = read_text(path, MAX_TOKENIZER_BYTES)
    if text.count('":') + text.count('["') > MAX_TOKENIZER_ENTRIES:
        raise UserError(
            f"data.tokenizer={path}: it has more than {MAX_TOKENIZER_ENTRIES:,} tokens and merges; is this one?"
        )
    return text


def _find_special(tokenizer: Tokenizer, special: SpecialToken, path: Path) -> tuple[str, int]:
    for token in (*special.names, *special.instead):
        if (number := tokenizer.token_to_id(token)) is not None:
            return token, number
    raise UserError(
        f"data.tokenizer={path}: no token in it {special.purpose}; add one of {', '.join(special.names)}, as in  "
        f"tokenizer.add_special_tokens(['{special.names[1]}'])"
    )
