"""Byte-level BPE tokenizers: learned from the training texts, or read from a tokenizer.json."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from paceline.data.corpora.limited_process import limit_tokenizer
from paceline.data.files import hash_files, invalid_data, invalid_format, missing_path_error, unreadable_error
from paceline.io.files import read_text
from paceline.workload import LogFn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEY = "data.tokenizer"
LEARN_TEXTS = 50_000  # the vocabulary is learned from the first texts, up to this many ...
LEARN_CHARACTERS = 64 << 20  # ... and up to this many characters
LONG_WORD_CHARACTERS = 1000
BLANKS = " \n\t"
_KINDS = (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")  # byte-level BPE takes a run of one of these for a word
_LONG_WORD = re.compile("|".join(f"({kind}{{{LONG_WORD_CHARACTERS}}}){kind}+" for kind in _KINDS))
TOKEN_CHARACTERS = 256  # no text has as many in each of its tokens: what lies beyond so many is cut anyway
BATCH_TEXTS = 2_000
BATCH_CHARACTERS = 4 << 20
MAX_TOKENIZER_BYTES = 1 << 26


@dataclass(frozen=True)
class SpecialToken:
    """A token that no text contains: its purpose, and its usual names, the first one in a learned vocabulary."""

    purpose: str
    names: tuple[str, ...]
    instead: tuple[str, ...] = ()


MASK = SpecialToken(
    "masks a word or an empty text",
    ("[MASK]", "<mask>", "<|mask|>"),
    ("[UNK]", "<unk>", "[PAD]", "<pad>", "<|endoftext|>", "</s>", "<eos>"),
)
END = SpecialToken(
    "ends a document",
    ("[END]", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]"),
    ("[SEP]", "<sep>"),
)


class ChosenTokenizer(NamedTuple):
    tokenizer: Tokenizer
    special: int

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """Return the smallest type for arrays of its tokens."""
        return np.uint16 if vocabulary_size(self.tokenizer) <= 1 << 16 else np.uint32


@dataclass(frozen=True)
class EncodedTexts:
    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    cut_texts: int
    empty_texts: int


def learn_bpe(texts: Iterable[str], vocab: int, max_length: int | None, lowercase: bool, special: str) -> Tokenizer:
    """Learn a tokenizer with at most `vocab` tokens, all bytes among them; `special` is token 0, in no text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
    """Parse the text of a tokenizer.json; ValueError if it is invalid."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(serialised)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError((str(error).splitlines() or ["invalid"])[0][:120]) from None


def restore_tokenizer(serialised: str) -> Tokenizer:
    """Parse a tokenizer that treats special tokens spelled in a text as plain text, with limits if it needs some."""
    tokenizer = parse_tokenizer(serialised)
    tokenizer.encode_special_tokens = True  # a text that spells [MASK] is text
    return cast("Tokenizer", limit_tokenizer(tokenizer))


def adapt_tokenizer(tokenizer: Tokenizer, max_length: int | None, lowercase: bool) -> Tokenizer:
    """Replace the padding and truncation of a user's tokenizer by ours."""
    from tokenizers import normalizers

    tokenizer.no_padding()
    tokenizer.no_truncation()
    if lowercase:
        fold, own = normalizers.Lowercase(), tokenizer.normalizer
        tokenizer.normalizer = fold if own is None else normalizers.Sequence([fold, own])
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return restore_tokenizer(tokenizer.to_str())


def encode_texts(tokenizer: Tokenizer, empty: int, texts: list[str], framed: bool = False) -> EncodedTexts:
    """Encode a batch of texts, each with at least the token `empty`; `framed`: between [CLS] and [SEP], or the like."""
    assert tokenizer.truncation is not None, "set by learn_bpe and adapt_tokenizer"
    max_length = tokenizer.truncation["max_length"]
    read = max_length * TOKEN_CHARACTERS
    encodings = tokenizer.encode_batch_fast([text[:read] for text in texts], add_special_tokens=framed)
    cut_texts = sum(len(text) == max_length and bool(text.overflowing) for text in encodings)
    tokens = [text.ids or [empty] for text in encodings]
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ids = np.fromiter(chain.from_iterable(tokens), np.uint32, int(lengths.sum()))
    return EncodedTexts(ids, lengths, cut_texts, empty_texts=sum(not len(text) for text in encodings))


def group_texts(samples: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
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
    """Tokenise on every core, and afterwards on one: a process that forks later must not hold such threads."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = before or "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before or "false"


def _take_first(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts to learn from. Very long words are cut: learning scans a word again for every token it adds."""
    characters = 0
    for count, text in enumerate(texts):
        if count == LEARN_TEXTS or characters >= LEARN_CHARACTERS:
            return
        characters += len(text)
        long = len(text) > LONG_WORD_CHARACTERS and (
            max(map(len, text.split()), default=0) > LONG_WORD_CHARACTERS
            or any(blank * LONG_WORD_CHARACTERS in text for blank in BLANKS)
        )
        yield _LONG_WORD.sub(lambda word: word[word.lastindex or 0], text) if long else text


def load_tokenizer(
    data: Any, texts: Iterable[str], special: SpecialToken, max_length: int | None, lowercase: bool, log: LogFn
) -> ChosenTokenizer:
    """Read the tokenizer that the section `data` names or, without one, learn it from the texts."""
    if data.tokenizer is None:
        return ChosenTokenizer(learn_bpe(texts, data.vocab, max_length, lowercase, special.names[0]), 0)
    tokenizer = read_tokenizer(data.tokenizer)
    ids = ((token, tokenizer.token_to_id(token)) for token in (*special.names, *special.instead))
    token, number = next(((token, number) for token, number in ids if number is not None), ("", 0))
    if not token:
        hint = f"add one of {', '.join(special.names)}, as in  tokenizer.add_special_tokens(['{special.names[1]}'])"
        raise invalid_data(f"{KEY}={data.tokenizer}: it has no token that {special.purpose}; {hint}", KEY)
    if token in special.instead:
        log(f"corpus: {KEY} has no {special.names[0]}: {token} {special.purpose} instead")
    return ChosenTokenizer(adapt_tokenizer(tokenizer, max_length, lowercase), number)


def read_tokenizer(path: Path) -> Tokenizer:
    if path.is_dir():
        raise invalid_data(f"{KEY}={path}: this is a folder; type  {KEY}={path / 'tokenizer.json'}", KEY)
    if not path.exists():
        raise missing_path_error(path, KEY, "file")
    try:
        tokenizer = parse_tokenizer(read_text(path, MAX_TOKENIZER_BYTES))
    except OSError as error:
        raise unreadable_error(f"{KEY}={path}", error, KEY) from None
    except ValueError as error:
        hint = "write one with  tokenizer.save('tokenizer.json')  or take that of a Hugging Face model"
        raise invalid_format(f"{KEY}={path}: this is not a tokenizer.json ({error}); {hint}", KEY) from None
    if not tokenizer.get_vocab_size():
        raise invalid_data(f"{KEY}={path}: its vocabulary is empty", KEY)
    return tokenizer


def hash_tokenizer(data: Any) -> str:
    if not data.tokenizer.is_file() or data.tokenizer.stat().st_size > MAX_TOKENIZER_BYTES:
        read_tokenizer(data.tokenizer)  # raises
    return hash_files([data.tokenizer])


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return one more than the highest id: there may be gaps below it."""
    return int(max(tokenizer.get_vocab().values())) + 1


def estimate_vocabulary_size(data: Any) -> int:
    """Return the size for texts that are not tokenised yet; a learned vocabulary may turn out smaller."""
    return int(data.vocab) if data.tokenizer is None else vocabulary_size(read_tokenizer(data.tokenizer))
