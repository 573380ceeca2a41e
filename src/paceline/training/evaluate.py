"""Exact evaluation: every sample once, and the same number on any layout.

The samples are cut into fixed chunks by position and whole chunks are handed to ranks, so a chunk's sums do not depend
on how many ranks there are; they are added up without rounding.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.data.prefetch import move
from paceline.launch.group import gather_objects
from paceline.layout import Layout
from paceline.parallel.precision import autocast
from paceline.workload import Samples, Workload


@torch.no_grad()
def evaluate(
    workload: Workload, model: nn.Module, samples: Samples, device: torch.device, precision: str, layout: Layout
) -> dict[str, Any]:
    """{"n": samples seen, metric: value …}

    All ranks make the same number of rounds, since under some layouts a forward pass is work for all of them; one that
    has no chunk left repeats the first and does not count it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = workload.evaluation_chunk
    chunks = math.ceil(len(samples) / size)
    names: list[str] = []
    mine: dict[int, list[float]] = {}
    was_training = model.training
    model.eval()
    for begin in range(0, chunks, layout.data):
        chunk = begin + layout.data_rank(rank)
        if chunk >= chunks and layout.plain:
            break
        number = chunk if chunk < chunks else 0
        ids = np.arange(number * size, min((number + 1) * size, len(samples)))
        ids = ids[np.argsort(samples.cost(ids), kind="stable")]
        with autocast(precision, device), _uncompiled(device):
            sums = workload.evaluate(model, move(samples.batch(ids, np.zeros_like(ids)), device))
        names = sorted(sums)
        if chunk < chunks:
            mine[chunk] = [float(sums[name]) for name in names] + [float(len(ids))]
    model.train(was_training)
    everyone = gather_objects((names, mine))
    names = next(found for found, _ in everyone if found)  # a rank without a chunk learns them from the others
    table = {chunk: row for _, rows in reversed(everyone) for chunk, row in rows.items()}
    assert len(table) == chunks, "a chunk was lost"
    totals = [math.fsum(column) for column in zip(*table.values(), strict=True)]
    metrics = workload.metrics(dict(zip(names, totals, strict=False)))
    return {"n": int(totals[-1]), **metrics}


def _uncompiled(device: torch.device) -> AbstractContextManager[object]:
    """Layers that are compiled for training run as they are written: a compilation would take longer than it saves."""
    return torch.compiler.set_stance("force_eager") if device.type == "cuda" else nullcontext()
