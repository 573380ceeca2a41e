"""What the run file of a classifier says of its model and its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline.config.decoder_shape import find_divisors
from paceline.config.sections import ModelSection, Section, conflict_error, field


class ClassifierModel(ModelSection):
    """A pre-norm transformer encoder with mean pooling over the tokens of a text."""

    width: int = field(128, "features", "size of the residual stream", gt=0)
    heads: int = field(4, "heads", "attention heads; must divide width", gt=0)
    layers: int = field(2, "layers", "encoder layers", gt=0)
    ffn: int = field(512, "features", "hidden size of the feed-forward part", gt=0)
    dropout: float = field(0.0, "probability", "dropout, drawn per sample and so the same on any layout", ge=0, lt=1)
    word_dropout: float = field(0.0, "probability", "input tokens hidden during training", ge=0, lt=1)
    label_smoothing: float = field(0.0, "probability", "of the target, shared out evenly over all classes", ge=0, lt=1)
    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(ge=0)]] = field(
        "none", "", "of a class in the loss: balanced makes all count alike, or {class: weight}, 1 for the others"
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ClassifierModel:
        if self.width % self.heads:
            near = min(find_divisors(self.width), key=lambda h: abs(h - self.heads))
            raise conflict_error(f"model.heads={self.heads} does not divide model.width={self.width}; try {near}")
        return self


class TextData(Section):
    """Labelled texts, tokenised once into a memory-mapped array."""

    source: Literal["docstrings", "ag_news", "csv", "jsonl", "parquet"] = field(
        "docstrings", "", "where the texts come from; docstrings are on every machine"
    )
    path: Path | None = field(None, "path", "file (csv, jsonl, parquet) or folder (ag_news) to read")
    test_path: Path | None = field(None, "path", "held-out file; without one, test_fraction of the rows is held out")
    test_fraction: float = field(0.1, "fraction", "rows held out when there is no test_path", gt=0, lt=1)
    text: str = field("text", "column", "column or key of the text")
    label: str = field("label", "column", "column or key of the label")
    max_length: int = field(256, "tokens", "longer texts are cut", gt=0)
    vocab: int = field(8192, "tokens", "size of the byte-level BPE vocabulary that is learned", ge=257, le=1 << 20)
    tokenizer: Path | None = field(None, "path", "your own tokenizer.json; without one a vocabulary is learned")
    lowercase: bool = field(False, "", "fold case before tokenising")
    limit: int = field(0, "rows", "read at most this many training rows; 0 reads all", ge=0)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of tokenised corpora, named by content")
