"""Fits by the names that tinytopics gave them: in this process, or on ranks that are started for it.

Both give (fit, losses) of our own kind. `paceline.tinytopics` has the whole interface of tinytopics.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.workloads.topics.in_process import fit
from paceline.workloads.topics.result.model import MODEL_FILE, TopicFit
from paceline.workloads.topics.sections import FitOptions


def fit_model(X: Any, k: int, num_epochs: int | None = None, **options: Any) -> tuple[TopicFit, list[float]]:
    """Fit in this process. `num_epochs` is the most passes; other options are those of `fit`."""
    if num_epochs is not None:
        options["passes"] = num_epochs
    model = fit(X, k, **options)
    return model, model.losses


def fit_model_distributed(
    X: Any,
    k: int,
    num_epochs: int | None = None,
    *,
    ranks: int | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> tuple[TopicFit, list[float]]:
    """Fit with the documents spread over ranks: those of torchrun, srun or mpirun, else `ranks` new processes (2).

    What is in memory is written to shards first, for the ranks to read. `out` keeps the run's folder.
    """
    from paceline.launch.environment import detect_rank
    from paceline.workloads.topics.command import train_topics
    from paceline.workloads.topics.files.reading import convert

    place = detect_rank(os.environ)
    allowed = [field.name for field in fields(FitOptions) if field.name not in ("starts", "passes", "residual")]
    if unknown := [name for name in options if name not in allowed]:
        raise UserError(f"fit_model_distributed: {unknown[0]} is not known; it takes {', '.join(allowed)}")
    if not isinstance(X, str | Path) and place is not None and place.world > 1:
        raise UserError(
            "fit_model_distributed: ranks of a launcher read the counts themselves; give the path of a file"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-topics-") as folder:
        asked = FitOptions(**options, passes=num_epochs)
        source = Path(X) if isinstance(X, str | Path) else Path(folder) / "shards"
        if not isinstance(X, str | Path):
            convert(X, source, fractional=asked.fractional)
        count = 1 if place is not None else (ranks or 2)
        run = train_topics(source, k, Path(out or Path(folder) / "fit"), asked, ranks=count, show=False)
        model = TopicFit.load(run / MODEL_FILE)
    return model, model.losses
