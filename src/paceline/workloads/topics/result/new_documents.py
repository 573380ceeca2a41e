"""Documents that a model has not seen, brought to its columns."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError
from paceline.workloads.topics.counts.blocks import Counts, SparseCounts
from paceline.workloads.topics.files.documents import SUFFIXES, is_text
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.files.texts import TextOptions, read_text

if TYPE_CHECKING:
    from paceline.workloads.topics.result.model import TopicFit

FILES = (".npy", ".npz", ".mtx", ".parquet", ".gz", ".safetensors", *SUFFIXES)


def matching_counts(model: TopicFit, source: Any, fractional: bool = False) -> Counts:
    """Counts with the columns of the model, from whatever `fit` takes or from texts."""
    texts = _texts(source)
    if texts is not None:
        return _counted(model, texts)
    counts = read_counts(source, fractional=fractional)
    terms = model.F.shape[1]
    if counts.terms != terms:
        raise UserError(
            f"the documents have {counts.terms:,} columns and the model {terms:,} terms: give the same columns in the "
            f"same order{', or the texts themselves' if model.terms else ''}"
        )
    if model.terms is not None and counts.vocabulary is not None:
        pairs = zip(counts.vocabulary, model.terms, strict=True)
        other = next((at for at, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
        if other is not None:
            raise UserError(
                f"column {other} (from 0) is {counts.vocabulary[other]!r} in the documents and {model.terms[other]!r} "
                "in the model: give the same columns in the same order, or the texts themselves"
            )
    return counts


def _texts(source: Any) -> str | Path | list[str] | None:
    """What is to be tokenised: texts, or the path of a file of texts. None for counts."""
    if isinstance(source, Path) or (isinstance(source, str) and _names_a_file(source)):
        path = Path(source).expanduser()
        return path if is_text(path) else None
    if isinstance(source, str):
        return [source]
    if isinstance(source, list | tuple) and source and all(isinstance(text, str) for text in source):
        return list(source)
    return None


def _names_a_file(text: str) -> bool:
    """A text has words in it; a path does not, or is there."""
    if len(text) > 1000 or "\n" in text:
        return False
    if text.lower().endswith(FILES) and len(text.split()) == 1:
        return True
    try:
        return ("/" in text or "." in text) and Path(text).expanduser().exists()
    except (OSError, ValueError):
        return False


def _counted(model: TopicFit, texts: str | Path | list[str]) -> SparseCounts:
    if model.terms is None:
        raise UserError(
            "texts were given, but the model does not know its terms: give counts, or set  model.terms = [...]  first"
        )
    known = {item.name for item in fields(TextOptions)}
    told = model.settings.get("text")
    options = TextOptions(**{key: value for key, value in (told or {}).items() if key in known})
    return read_text(texts, options, model.terms)
