"""How well trees do on held-out rows: sums over fixed chunks of rows, which are the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.classification import class_metrics, class_sums
from paceline.launch.group import gather_objects
from paceline.record.files import finite
from paceline.training.evaluation import ChunkSums, joined
from paceline.workloads.trees.objectives import Task
from paceline.workloads.trees.targets import TreeTarget

CHUNK = 4096


def probabilities(margins: np.ndarray, target: TreeTarget) -> np.ndarray:
    """(rows, classes) or, where numbers are predicted, those numbers: (rows,)."""
    scores = margins.astype(np.float64)
    match target.objective.task:
        case Task.BINARY:
            second = 1 / (1 + np.exp(-scores[:, 0]))
            return np.stack([1 - second, second], axis=1)
        case Task.CLASSES:
            powers = np.exp(scores - scores.max(1, keepdims=True))
            return powers / powers.sum(1, keepdims=True)
        case Task.COUNT:
            return np.exp(scores[:, 0])
    return scores[:, 0]


def sums_of(margins: np.ndarray, labels: np.ndarray, target: TreeTarget) -> dict[str, Any]:
    """Sums over rows."""
    scores = torch.as_tensor(margins, dtype=torch.float64)
    if target.objective.of_classes:
        logits = torch.cat([torch.zeros_like(scores), scores], dim=1) if scores.shape[1] == 1 else scores
        classes = torch.as_tensor(labels).long()
        loss = torch.nn.functional.cross_entropy(logits, classes, reduction="sum")
        return {"loss": loss, "count": len(classes), **class_sums(logits, classes)}
    truth = torch.as_tensor(np.asarray(labels, np.float64))
    said = scores[:, 0].exp() if target.objective.task is Task.COUNT else scores[:, 0]
    squares, apart = (said - truth) ** 2, (said - truth).abs()
    loss = said - truth * scores[:, 0] + torch.lgamma(truth + 1) if target.objective.task is Task.COUNT else squares
    found = {"loss": loss, "squares": squares, "apart": apart, "truth": truth, "truth_squares": truth**2}
    return {**{name: value.sum() for name, value in found.items()}, "count": len(truth)}


def chunks_of(rows: int, rank: int, world: int) -> range:
    """Those of a rank."""
    count = -(-rows // CHUNK)
    return range(count * rank // world, count * (rank + 1) // world)


def metrics_of_chunks(mine: ChunkSums, rows: int, target: TreeTarget) -> dict[str, Any]:
    """Over the rows of all ranks."""
    sums = joined(gather_objects(mine), -(-rows // CHUNK))
    count = sums["count"]
    found: dict[str, Any] = {"n": count, "of": rows, "loss": sums["loss"] / count}
    if target.objective.of_classes:
        metrics = class_metrics(sums)
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in metrics.items()}
        return {**found, **finite(plain), "classes": list(target.classes)}
    mean_square = sums["squares"] / count
    spread = sums["truth_squares"] / count - (sums["truth"] / count) ** 2
    explained = {"r2": 1 - mean_square / spread} if spread > 0 else {}
    return {**found, "rmse": mean_square**0.5, "mae": sums["apart"] / count, **explained}
