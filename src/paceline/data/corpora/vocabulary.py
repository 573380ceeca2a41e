"""How texts become tokens: all that using a trained model takes of the corpus it was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.corpora.tokenised import TOKENIZER, TokenisedCorpus
from paceline.errors import UserError
from paceline.plain_files import read_bytes, read_text
from paceline.record.files import read_json, write_atomic, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from paceline.data.corpora.bpe import Encoded

FACTS = "vocabulary.json"
CLASSES = "classes.json"


@dataclass(frozen=True, eq=False)
class Vocabulary:
    folder: Path
    """Where the tokeniser is."""
    size: int
    special: int
    """The id of the token that no text contains, see `TokenisedCorpus`."""
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, corpus: TokenisedCorpus) -> Vocabulary:
        return cls(corpus.folder, corpus.vocab, corpus.special, getattr(corpus, "classes", ()))

    @classmethod
    def open(cls, folder: Path) -> Vocabulary:
        """What `keep` wrote."""
        try:
            classes = json.loads(read_text(folder / CLASSES)) if (folder / CLASSES).exists() else []
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or "it is not JSON"
            raise UserError(f"{folder / CLASSES} cannot be read: {why}") from None
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise UserError(f"{folder / CLASSES} is damaged: it does not list the names of classes")
        facts = read_json(folder / FACTS)
        size, special = facts.get("size"), facts.get("special")
        if type(size) is not int or type(special) is not int or not 0 <= special < size:
            raise UserError(f"{folder / FACTS} is damaged: its values are not those of a vocabulary")
        return cls(folder, size, special, tuple(classes))

    def copy_tokenizer(self, folder: Path) -> None:
        try:
            write_atomic(folder / TOKENIZER, read_bytes(self.folder / TOKENIZER))
        except OSError as error:
            raise UserError(f"{self.folder / TOKENIZER} cannot be read: {error.strerror}") from None

    def keep(self, folder: Path) -> None:
        """Write it into a folder that needs neither the corpus nor its cache."""
        self.copy_tokenizer(folder)
        if self.classes:
            write_json(folder / CLASSES, list(self.classes))
        write_json(folder / FACTS, {"size": self.size, "special": self.special})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from paceline.data.corpora import bpe

        try:
            return bpe.load(read_text(self.folder / TOKENIZER))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{self.folder / TOKENIZER} cannot be read: {why}") from None

    def encode(self, texts: list[str]) -> Encoded:
        from paceline.data.corpora import bpe

        if self.tokenizer.truncation is None:
            raise UserError(f"{self.folder / TOKENIZER} is damaged: it does not say where texts are cut")
        return bpe.encode(self.tokenizer, self.special, texts)
