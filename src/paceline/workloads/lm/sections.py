"""What the run file of a language model says of its decoder and its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from paceline.config.decoder_shape import DecoderShape
from paceline.config.sections import ModelSection, Section, conflict_error, field
from paceline.errors import UserError


class LMModel(ModelSection):
    """A decoder. Fields that are not given come from the preset."""

    preset: Literal["custom", "tiny", "small", "gpt2", "1b", "1.3b", "3b", "7b", "8b", "13b", "70b", "405b"] = field(
        "tiny", "", "sizes that fields below override; custom needs width, heads and layers"
    )
    width: int | None = field(None, "features", "size of the residual stream", gt=0)
    heads: int | None = field(None, "heads", "attention heads; must divide width", gt=0)
    kv_heads: int | None = field(None, "heads", "heads of keys and values; must divide heads", gt=0)
    layers: int | None = field(None, "layers", "decoder layers", gt=0)
    ffn: int | None = field(None, "features", "hidden size of the feed-forward part", gt=0)
    ffn_kind: Literal["swiglu", "gelu"] | None = field(None, "", "gated or plain feed-forward part")
    experts: int | None = field(None, "experts", "feed-forward parts of each layer, of ffn features each", gt=0)
    top_k: int | None = field(None, "experts", "those that a token passes; without it 2", gt=0)
    shared_ffn: int | None = field(None, "features", "of an expert that every token passes", gt=0)
    balance_by: Literal["loss", "bias"] | None = field(
        None, "", "how experts are balanced: a loss (the default), or biases of the router that no gradient moves"
    )
    balance: float = field(0.01, "", "weight of that loss, or step of the biases", ge=0)
    positions: Literal["rotary", "learned"] | None = field(None, "", "how a token knows its place")
    context: int | None = field(None, "tokens", "learned positions; without it data.sequence", gt=0)
    tied: bool | None = field(None, "", "the head shares the weights of the embedding")
    vocab: int | None = field(None, "tokens", "rows of the embedding; without it those of the data", gt=0)

    @model_validator(mode="after")
    def _sizes_fit(self) -> LMModel:
        try:
            self.shape(vocab=1, sequence=1)
        except UserError as error:
            raise conflict_error(str(error)) from None
        return self

    def shape(self, vocab: int, sequence: int) -> DecoderShape:
        """Return the whole shape for `vocab` tokens in samples of `sequence`; UserError if sizes do not fit."""
        given = self.model_dump(exclude={"preset", "balance", *ModelSection.model_fields}, exclude_none=True)
        return DecoderShape.of(self.preset, given, vocab, sequence)


class LMData(Section):
    """Texts end to end, tokenised once into a memory-mapped array and cut into samples of equal length."""

    source: Literal["docstrings", "text"] = field("docstrings", "", "of the texts; docstrings are on every machine")
    path: Path | None = field(None, "path", "text: a file, a folder, or a pattern such as books/*.txt")
    documents: Literal["files", "lines"] = field("files", "", "text: what is one document")
    sequence: int = field(256, "tokens", "length of a sample", gt=0)
    vocab: int = field(4096, "tokens", "size of the byte-level BPE vocabulary that is learned", ge=257, le=1 << 20)
    tokenizer: Path | None = field(None, "path", "your own tokenizer.json; without one a vocabulary is learned")
    test_fraction: float = field(0.1, "fraction", "documents held out", gt=0, lt=1)
    limit: int = field(0, "documents", "read at most this many; 0 reads all", ge=0)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of tokenised corpora, named by content")
