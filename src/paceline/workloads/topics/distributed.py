"""Fit a topic model on several ranks from Python."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch.environment import detect_rank
from paceline.workloads.topics.command import train_topics
from paceline.workloads.topics.files.reading import convert
from paceline.workloads.topics.result.model import MODEL_FILE, TopicFit
from paceline.workloads.topics.sections import FitOptions


def fit_distributed(
    X: Any, k: int, *, ranks: int | None = None, out: str | Path | None = None, **options: Any
) -> TopicFit:
    """Fit with the documents spread over ranks: those of torchrun, srun or mpirun, else `ranks` new processes (2).

    What is in memory is written to shards first, for the ranks to read. `out` keeps the run's folder. Other options are
    those of `fit`.
    """
    here = detect_rank(os.environ)
    allowed = [field.name for field in fields(FitOptions) if field.name not in ("starts", "residual")]
    if unknown := [name for name in options if name not in allowed]:
        message = f"fit_distributed: {unknown[0]} is not known; it takes {', '.join(allowed)}"
        raise UserError(message, code="unknown-key", key=unknown[0])
    on_disk = isinstance(X, str | Path)
    if not on_disk and here is not None and here.world > 1:
        message = "fit_distributed: ranks of a launcher read the counts themselves; give the path of a file"
        raise UserError(message, code="not-supported")
    with tempfile.TemporaryDirectory(prefix="paceline-topics-") as folder:
        asked = FitOptions(**options)
        source = Path(X) if on_disk else Path(folder) / "shards"
        if not on_disk:
            convert(X, source, fractional=asked.fractional)
        count = 1 if here is not None else (ranks or 2)
        run = train_topics(source, k, Path(out or Path(folder) / "fit"), asked, ranks=count, show=False)
        return TopicFit.load(run / MODEL_FILE)
