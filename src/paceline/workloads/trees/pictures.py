"""Which columns the trees use, as a picture in the run's folder; its report shows it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from paceline.record.files import write_atomic
from paceline.record.run_dir import RunDir

SHOWN = 20


def write_importance(importance: Mapping[str, float], folder: Path, step: int) -> None:
    from matplotlib.figure import Figure

    shown = list(importance.items())[:SHOWN][::-1]
    figure = Figure(figsize=(6, 0.8 + 0.26 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.barh([name[:32] for name, _ in shown], [100 * share for _, share in shown], color="#4477aa")
    axes.set_xlabel("% of what all splits gain")
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    pictures = RunDir(folder).pictures
    pictures.mkdir(exist_ok=True)
    write_atomic(pictures / f"importance-{step:06d}.png", content.getvalue())
