"""Pictures of what a model finds, in the run's folder: a few held-out samples, the same at every evaluation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.data.prefetch import move
from paceline.record.files import write_atomic
from paceline.record.run_dir import RunDir
from paceline.training.evaluation import HeldOut, evaluating

if TYPE_CHECKING:
    from paceline.training.loop import GradientJob

PICTURED = 6
"""Samples, spread evenly over the split, or over `Samples.pictured` where only some of them are worth a picture."""


def write_pictures(job: GradientJob, held_out: HeldOut) -> None:
    """All ranks compute them, since under some layouts a forward pass is work for all of them; the main one writes."""
    workload, model, context = job.workload, job.state.model.unwrapped, job.context
    if not workload.has("pictures"):
        return
    worth = getattr(held_out.samples, "pictured", held_out.ids)
    ids = worth[np.unique(np.linspace(0, len(worth) - 1, PICTURED).astype(np.int64))]
    batch = move(held_out.samples.batch(ids, np.zeros_like(ids)), context.device)
    with evaluating(model, context.spec.train.precision, context.device):
        found = workload.pictures(model, batch)
    if context.place.rank == 0:
        for name, picture in found.items():
            write_picture(RunDir(context.folder).pictures / f"{name}-{job.state.step:06d}.png", picture)


def write_picture(file: Path, picture: np.ndarray) -> None:
    """Bytes [H, W, 3] as they are; [H, W] are the numbers of classes: the file holds them, and a colour for each."""
    from PIL import Image

    file.parent.mkdir(exist_ok=True)
    content, image = io.BytesIO(), Image.fromarray(picture)
    if picture.ndim == 2:
        image.putpalette(palette().tobytes())
    image.save(content, format="PNG")
    write_atomic(file, content.getvalue())


def palette() -> np.ndarray:
    """A colour for each of the 256 values of a mask: 0 is black, 255 grey, neighbouring classes are far apart."""
    from matplotlib import colormaps

    order = [shade + 2 * hue for shade in (0, 1) for hue in range(10) if hue != 7]  # without the greys
    colours = (colormaps["tab20"](np.resize(order, 256))[:, :3] * 255).astype(np.uint8)
    colours = np.roll(colours, 1, axis=0)
    colours[0], colours[255] = 0, 128
    return colours
