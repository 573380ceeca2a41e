"""Evaluate held-out samples during a run: every sample once, and the same number on any layout."""

import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil, fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.order import Order, count_evaluated, select_evaluated
from paceline.data.prefetch import iter_batches, move_batch
from paceline.data.samples import cost_of, samples_of
from paceline.errors import RunFailed, invalid_workload
from paceline.io.files import replace_nonfinite, write_atomic
from paceline.launch.process_group import gather_objects
from paceline.nn.experts import count_choices, summarize_loads
from paceline.parallel.precision import autocast
from paceline.runlog.run_dir import RunDir
from paceline.workload import Samples, Workload

if TYPE_CHECKING:
    from paceline.trainer.loop import GradientJob


MAX_RECORDED = 10_000  # numbers in an array of an "evaluate" event


@dataclass(frozen=True)
class HeldOut:
    """The samples of the held-out split that are evaluated."""

    samples: Samples
    ids: np.ndarray

    @classmethod
    def of(cls, workload: Workload, order: Order) -> "HeldOut | None":
        """Return None if nothing is held out."""
        samples = samples_of(workload, "test")
        if samples is None:
            return None
        count = count_evaluated(workload.spec.train, order, len(samples), workload.evaluation_chunk)
        return cls(samples, select_evaluated(len(samples), count))

    def batches(self, chunks: Iterable[int], size: int) -> Iterator[Any]:
        ids = (self.ids[chunk * size : (chunk + 1) * size] for chunk in chunks)
        sorted_ids = (some[np.argsort(cost_of(self.samples, some), kind="stable")] for some in ids)
        return iter_batches(self.samples, ((some, np.zeros_like(some)) for some in sorted_ids))


def evaluate(job: "GradientJob", held_out: HeldOut) -> dict[str, Any]:
    """Return {"n": samples seen, "of": samples held out, metric: value …}.

    Ranks get whole chunks, so that sums do not depend on the number of ranks. All make the same number of rounds, since
    a forward pass may need all of them; one that has no chunk left repeats the first and does not count it.
    """
    workload, model, layout, device = job.workload, job.state.model.unwrapped, job.layout, job.context.device
    context, precision = job.state.model.context, job.context.spec.train.precision
    data_rank, size = layout.data_rank(job.context.rank_info.rank), workload.evaluation_chunk
    chunks = ceil(len(held_out.ids) / size)
    mine = ChunkSums()
    rounds = range(data_rank, chunks if layout.plain else ceil(chunks / layout.data) * layout.data, layout.data)
    batches = held_out.batches((chunk if chunk < chunks else 0 for chunk in rounds), size)
    for chunk, batch in zip(rounds, batches, strict=True):
        own = batch if context is None else workload.divide_context(batch, context)  # a part of each sequence
        with use_evaluation_mode(model, precision, device), count_choices(job.state.model.parts) as loads:
            sums = workload.evaluate(model, move_batch(own, device, precision))
            sums, loads = (sums, loads) if context is None else (context.sum(sums, device), context.sum(loads, device))
        if chunk < chunks:
            mine.add(chunk, sums)
            _add_sums(mine.loads, {name: _to_array(name, load) for name, load in loads.items()})
        job.context.beat("evaluation", job.state.step)
    everyone: dict[int, ChunkSums] = {}
    for rank, sums_of_rank in gather_objects((data_rank, mine)):  # ranks that share a model have the same sums
        everyone.setdefault(rank, sums_of_rank).loads.update(sums_of_rank.loads)  # but those of their own layers
    metrics = workload.metrics(sum_chunks(list(everyone.values()), chunks))
    loads_of_all: dict[str, np.ndarray] = {}
    for part in everyone.values():
        _add_sums(loads_of_all, part.loads)
    classes = {"classes": list(workload.classes())} if "support" in metrics else {}
    found = {name: v for name, v in metrics.items() if not hasattr(v, "tolist") or v.size <= MAX_RECORDED}
    plain = {n: replace_nonfinite(v.tolist()) if hasattr(v, "tolist") else v for n, v in found.items()}
    return {"n": len(held_out.ids), "of": len(held_out.samples), **plain, **classes, **summarize_loads(loads_of_all)}


@contextmanager
def use_evaluation_mode(model: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Compute in the run's precision, without gradients and compiler."""
    was_training = model.training
    model.eval()
    torch.clear_autocast_cache()  # casts of other weights, where this is inside of a training pass
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with torch.no_grad(), autocast(precision, device), uncompiled:
            yield
    finally:
        torch.clear_autocast_cache()
        model.train(was_training)


@dataclass
class ChunkSums:
    """Sums of a rank; floats are kept by chunk, to be added in one order."""

    whole: dict[str, np.ndarray] = field(default_factory=dict)
    chunks: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    loads: dict[str, np.ndarray] = field(default_factory=dict)  # tokens of each expert, by mixture

    def add(self, chunk: int, sums: Mapping[str, Tensor | float]) -> None:
        if not isinstance(sums, Mapping):
            line = 'return {"loss": loss_sum, "count": len(labels)}'
            reason = f"workload: evaluate returned {type(sums).__name__}; return sums, as in  {line}"
            raise RunFailed(reason, code="invalid-workload", key="evaluate")
        arrays = {name: _to_array(name, value) for name, value in sums.items()}
        whole = {name: value for name, value in arrays.items() if value.dtype == np.int64}
        self.chunks[chunk] = {name: value for name, value in arrays.items() if name not in whole}
        _add_sums(self.whole, whole)


def _add_sums(totals: dict[str, np.ndarray], sums: Mapping[str, np.ndarray]) -> None:
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value


def sum_chunks(parts: Sequence[ChunkSums], chunks: int) -> dict[str, Any]:
    """Return the sums over all chunks, added without rounding."""
    rows = {chunk: row for part in parts for chunk, row in part.chunks.items()}
    assert len(rows) == chunks, "a chunk was lost"
    totals: dict[str, np.ndarray] = {}
    for part in parts:
        _add_sums(totals, part.whole)
    for name, first in rows[0].items():
        columns = zip(*(row[name].ravel().tolist() for row in rows.values()), strict=True)
        totals[name] = np.array([fsum(column) for column in columns]).reshape(first.shape)
    return {name: value if value.ndim else value.item() for name, value in totals.items()}


def _to_array(name: str, value: Any) -> np.ndarray:
    """Return a metric's sum on the host, as int64 or float64."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().double() if value.is_floating_point() else value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind in "biuf":
        return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    raise invalid_workload("evaluate", f"evaluate gave {name!r} as {type(value).__name__}; give a number or a tensor")


PICTURED_SAMPLES = 6


def write_evaluation_pictures(job: "GradientJob", held_out: HeldOut) -> None:
    """Write pictures of a few held-out samples; all ranks compute them, the main one writes."""
    workload, model, context = job.workload, job.state.model.unwrapped, job.context
    if not workload.has("pictures"):
        return
    candidates = getattr(held_out.samples, "pictured", held_out.ids)
    ids = candidates[np.unique(np.linspace(0, len(candidates) - 1, PICTURED_SAMPLES).astype(np.int64))]
    batch = held_out.samples.batch(ids, np.zeros_like(ids))
    batch = move_batch(batch, context.device, context.spec.train.precision)
    with use_evaluation_mode(model, context.spec.train.precision, context.device):
        pictures = workload.pictures(model, batch)
    if context.rank_info.rank == 0:
        for name, picture in pictures.items():
            write_picture(RunDir(context.folder).pictures / f"{name}-{job.state.step:06d}.png", picture)


def write_picture(file: Path, picture: np.ndarray) -> None:
    """Write a PNG: bytes [H, W, 3], or class numbers [H, W] with a colour for each."""
    from PIL import Image

    file.parent.mkdir(exist_ok=True)
    content, image = io.BytesIO(), Image.fromarray(picture)
    if picture.ndim == 2:
        image.putpalette(build_palette().tobytes())
    image.save(content, format="PNG")
    write_atomic(file, content.getvalue())


def build_palette() -> np.ndarray:
    """Return a colour for each value of a mask: 0 is black, 255 grey, neighbours differ."""
    from matplotlib import colormaps

    order = [shade + 2 * hue for shade in (0, 1) for hue in range(10) if hue != 7]  # without the greys
    colours = (colormaps["tab20"](np.resize(order, 256))[:, :3] * 255).astype(np.uint8)
    colours = np.roll(colours, 1, axis=0)
    colours[0], colours[255] = 0, 128
    return colours
