"""Sections `model` and `data` of a run file of a network for tables."""

from __future__ import annotations

from typing import Literal

from paceline.config.sections import DataSection, ModelSection, TableData, field


class TabularModel(ModelSection):
    """Embeddings of categories and of bins of numbers, then dense layers around residual connections."""

    objective: Literal["auto", "binary", "multiclass", "regression"] = field(
        "auto", "", "what is predicted; auto looks at the label (two values, words, or numbers)"
    )
    width: int = field(128, "features", "of a dense layer", gt=0)
    layers: int = field(1, "layers", "after the first", ge=0, le=64)
    embedding: int = field(8, "features", "of a category, and of a bin of a number", gt=0)
    bins: int = field(128, "bins", "of a number, with equally many training rows in each", gt=1, le=1024)
    dropout: float = field(0.2, "fraction", "of the features of a layer, left out in each step", ge=0, lt=1)


class TabularData(TableData, DataSection):
    """A table with a label column; without a path, a synthetic one."""
