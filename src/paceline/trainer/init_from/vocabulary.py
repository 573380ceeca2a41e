"""Weights and texts must mean the same by a token: a trained embedding is of no use under another vocabulary."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from paceline.data.corpora.tokenised import TOKENIZER
from paceline.errors import UserError
from paceline.workload import LogFn, Workload


def check_same_vocabulary(workload: Workload, start: Path, say: LogFn) -> None:
    """Refuse a run whose texts have other tokens than those that the weights in `start` were trained with.

    Where the run takes what fits (`model.match=some`), it is said and no more.
    """
    theirs = find_tokenizer(start)
    if theirs is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        workload.keep(Path(folder))
        ours = _read_tokens(Path(folder) / TOKENIZER)
    if ours is None or (there := _read_tokens(theirs)) is None or ours == there:
        return
    wrong = f"model.init_from={start} was trained with another vocabulary than these texts have"
    if workload.spec.model.match == "all":  # type: ignore[attr-defined]
        raise UserError(f"{wrong}; tokenise them with its own, by  data.tokenizer={theirs}")
    say(f"weights: {wrong}; its own is  data.tokenizer={theirs}")


def find_tokenizer(start: Path) -> Path | None:
    """Of a run, of one of its checkpoints, or of a folder with a model."""
    places = (start / "kept", start.parent.parent / "kept", start)
    return next((place / TOKENIZER for place in places if start.is_dir() and (place / TOKENIZER).is_file()), None)


def _read_tokens(file: Path) -> dict[str, Any] | None:
    """The id of each token; None where the file is of another kind, and others will say so."""
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab())
    except Exception:  # the library raises nothing narrower
        return None
