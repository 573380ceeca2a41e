"""The texts of a run, tokenised with the model's own tokeniser; and what is refused of them."""

from __future__ import annotations

from typing import Any

from paceline.data.cache import Say
from paceline.data.corpora.stream import TokenStreams
from paceline.data.corpora.tokens import LabelledCorpus
from paceline.errors import UserError
from paceline.spec import RunSpec
from paceline.workloads.transformers.folder import tokenizer_file
from paceline.workloads.transformers.sections import LABELLED

Corpus = TokenStreams | LabelledCorpus


class FramedCorpus(LabelledCorpus):
    """Labelled texts with the tokens around them that mark a text, such as [CLS] … [SEP]."""

    prefix = "framed-"
    framed = True


def prepared(spec: RunSpec, say: Say = lambda line: None) -> Corpus:
    """From the cache, or built now."""
    return _kind(spec).prepare(_settings(spec), say)


def cached(spec: RunSpec) -> Corpus | None:
    """If it is in the cache; nothing is built."""
    return _kind(spec).cached(_settings(spec))


def _kind(spec: RunSpec) -> type[TokenStreams] | type[FramedCorpus]:
    model: Any = spec.model
    data: Any = spec.data
    if model.task == "causal_lm":
        if data.source in LABELLED:
            raise UserError(
                f"data.source={data.source} has texts with labels, and model.task=causal_lm reads text or docstrings; "
                "type  model.task=sequence_classification  or  data.source=text"
            )
        return TokenStreams
    if data.source == "text":
        raise UserError(
            "data.source=text has no labels, which model.task=sequence_classification needs; "
            f"use one of docstrings, {', '.join(LABELLED)}"
        )
    return FramedCorpus


def _settings(spec: RunSpec) -> Any:
    """The section `data` with the tokeniser that the model's folder has."""
    return spec.data.model_copy(update={"tokenizer": tokenizer_file(spec.model, spec.data)})
