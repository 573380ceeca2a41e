"""Exact evaluation: every sample once, and the same number on any layout.

The samples are cut into fixed chunks by position and whole chunks are handed to ranks, so a chunk's sums do not depend
on how many ranks there are; they are added up without rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.training.data import move
from paceline.training.precision import autocast
from paceline.workload import Samples, Workload

CHUNK = 256


@torch.no_grad()
def evaluate(
    workload: Workload, model: nn.Module, samples: Samples, device: torch.device, precision: str
) -> dict[str, Any]:
    """{"n": samples seen, metric: value …}"""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    chunks = math.ceil(len(samples) / CHUNK)
    names: list[str] = []
    mine: dict[int, list[float]] = {}
    was_training = model.training
    model.eval()
    for chunk in range(rank, chunks, world):
        ids = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, len(samples)))
        ids = ids[np.argsort(samples.cost(ids), kind="stable")]
        with autocast(precision, device):
            sums = workload.evaluate(model, move(samples.batch(ids, np.zeros_like(ids)), device))
        names = sorted(sums)
        mine[chunk] = [float(sums[name]) for name in names] + [float(len(ids))]
    model.train(was_training)
    table = _gather(mine, names, chunks, world)
    totals = [math.fsum(column) for column in zip(*table.values(), strict=True)]
    metrics = workload.metrics(dict(zip(names, totals, strict=False)))
    return {"n": int(totals[-1]), **metrics}


def _gather(mine: dict[int, list[float]], names: list[str], chunks: int, world: int) -> dict[int, list[float]]:
    """The rows of all ranks; a rank without a chunk learns the names from the others."""
    if world == 1:
        return mine
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (names, mine))
    names[:] = next(n for n, _ in everyone if n)
    table = {chunk: row for _, rows in everyone for chunk, row in rows.items()}
    assert len(table) == chunks, "a chunk was lost"
    return table
