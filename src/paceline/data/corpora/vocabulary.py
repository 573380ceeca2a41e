"""How texts become tokens: all that using a trained model takes of the corpus it was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.corpora.tokenised import TOKENIZER, TokenisedCorpus
from paceline.errors import UserError
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
            classes = json.loads((folder / CLASSES).read_text("utf-8")) if (folder / CLASSES).exists() else ()
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / CLASSES} cannot be read: {error}") from None
        facts = read_json(folder / FACTS)
        return cls(folder, facts["size"], facts["special"], tuple(classes))

    def copy_tokenizer(self, folder: Path) -> None:
        write_atomic(folder / TOKENIZER, (self.folder / TOKENIZER).read_bytes())

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
            return bpe.load((self.folder / TOKENIZER).read_text("utf-8"))
        except OSError as error:
            raise UserError(f"{self.folder / TOKENIZER} cannot be read: {error.strerror}") from None

    def encode(self, texts: list[str]) -> Encoded:
        from paceline.data.corpora import bpe

        return bpe.encode(self.tokenizer, self.special, texts)
