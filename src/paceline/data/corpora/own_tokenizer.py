"""The user's own tokeniser, a `tokenizer.json`, instead of a vocabulary that is learned from the texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.data.files import digest_of_files, not_there
from paceline.errors import UserError
from paceline.plain_files import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BUILT_BYTES = 8 << 20
"""Of a tokenizer.json that a plan builds the tokeniser of; of a longer one it reads the ids alone."""
MOST_BYTES, MOST_ENTRIES = 1 << 26, 1_000_000
"""Of any tokenizer.json, and tokens and merges in it; the largest that people use have 35 MB and 800,000."""


@dataclass(frozen=True)
class Special:
    """A token that no text contains: what it is for, and its usual names, the first one in a learned vocabulary."""

    purpose: str
    names: tuple[str, ...]
    instead: tuple[str, ...] = ()
    """Names of others that can do the same."""


MASK = Special(
    "hides a word and stands for an empty text",
    ("[MASK]", "<mask>", "<|mask|>"),
    ("[UNK]", "<unk>", "[PAD]", "<pad>", "<|endoftext|>", "</s>", "<eos>"),
)
END = Special(
    "ends a document",
    ("[END]", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]"),
    ("[SEP]", "<sep>"),
)


class Chosen(NamedTuple):
    """A tokeniser, and the id of the special token that its corpus needs."""

    tokenizer: Tokenizer
    special: int


def tokenizer_of(
    data: Any, texts: Iterable[str], special: Special, max_length: int | None, lowercase: bool, say: Callable[..., None]
) -> Chosen:
    """The tokeniser that the section `data` names or, without one, one that is learned."""
    from paceline.data.corpora import bpe

    if data.tokenizer is None:
        return Chosen(bpe.learn(texts, data.vocab, max_length, lowercase, special.names[0]), 0)
    tokenizer = read_tokenizer(data.tokenizer)
    token, number = _find(tokenizer, special, data.tokenizer)
    if token in special.instead:
        say(f"corpus: data.tokenizer has no {special.names[0]}: what {special.purpose} is its {token}")
    return Chosen(bpe.adapted(tokenizer, max_length, lowercase), number)


def read_tokenizer(path: Path) -> Tokenizer:
    """From a file that may be anything; one line says what is wrong with it."""
    from paceline.data.corpora import bpe

    given = f"data.tokenizer={path}"
    if path.is_dir():
        raise UserError(f"{given}: this is a folder; type  data.tokenizer={path / 'tokenizer.json'}")
    if not path.exists():
        raise not_there(path, "data.tokenizer", "file")
    try:
        tokenizer = bpe.parsed(_text_of(path))
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


def digest_of_tokenizer(data: Any) -> str:
    """What the key of a cache needs to know of it."""
    if not data.tokenizer.is_file() or data.tokenizer.stat().st_size > MOST_BYTES:
        read_tokenizer(data.tokenizer)  # says why not
    return digest_of_files([data.tokenizer])


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the highest id: there may be holes below it."""
    return int(max(tokenizer.get_vocab().values())) + 1


def planned_vocabulary(data: Any) -> int:
    """Of texts that are not tokenised yet; a learned one may turn out smaller. A large tokeniser is not built."""
    if data.tokenizer is None:
        return int(data.vocab)
    if data.tokenizer.is_file() and data.tokenizer.stat().st_size > BUILT_BYTES:
        return _numbered(data.tokenizer)
    return vocabulary_size(read_tokenizer(data.tokenizer))


def _numbered(path: Path) -> int:
    """One more than the highest id that the file of a tokeniser mentions."""
    given = f"data.tokenizer={path}"
    try:
        content = json.loads(_text_of(path))
        vocab, added = content["model"]["vocab"], content.get("added_tokens", ())
        known = len(vocab) if isinstance(vocab, list) else 1 + max(vocab.values())
        return int(max(known, *(1 + token["id"] for token in added), 1))
    except OSError as error:
        raise UserError(f"{given}: cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{given}: this is not a tokenizer.json: its vocabulary cannot be read") from None


def _text_of(path: Path) -> str:
    text = read_text(path, MOST_BYTES)
    if text.count('":') + text.count('["') > MOST_ENTRIES:
        raise UserError(f"data.tokenizer={path}: it has more than {MOST_ENTRIES:,} tokens and merges; is this one?")
    return text


def _find(tokenizer: Tokenizer, special: Special, path: Path) -> tuple[str, int]:
    for token in (*special.names, *special.instead):
        if (number := tokenizer.token_to_id(token)) is not None:
            return token, number
    raise UserError(
        f"data.tokenizer={path}: no token in it {special.purpose}; add one of {', '.join(special.names)}, as in  "
        f"tokenizer.add_special_tokens(['{special.names[1]}'])"
    )
