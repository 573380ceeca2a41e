"""Score predictions: losses, sums over fixed chunks of held-out rows, and the metrics these give.

A chunk is on one rank as a whole, so that its sums are the same on any number of ranks.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch

from paceline.config.registry import guard_user_code, load_user_function
from paceline.data.prepared_table import RowSplit, TableTarget, Task
from paceline.errors import InvalidValue
from paceline.launch.process_group import broadcast_from_main, gather_objects
from paceline.nn.class_metrics import class_sums, list_class_metrics, sum_two_classes
from paceline.trainer.evaluation import ChunkSums, sum_chunks

CHUNK = 4096
LOSS_ROWS = 1 << 14  # rows whose losses are computed at a time: they stay in the cache of a core
NDCG_PLACES = 10
METRIC_KEY = "model.metric"


def predict_from_margins(margins: np.ndarray, target: TableTarget) -> np.ndarray:
    """Return probabilities (rows, classes) or, where numbers are predicted, the numbers (rows,)."""
    scores = margins.astype(np.float64)
    match target.task:
        case Task.BINARY:
            second = 1 / (1 + np.exp(-scores[:, 0]))
            return np.stack([1 - second, second], axis=1)
        case Task.CLASSES:
            powers = np.exp(scores - scores.max(1, keepdims=True))
            return powers / powers.sum(1, keepdims=True)
        case Task.COUNT:
            return np.exp(scores[:, 0])
    return scores[:, 0]


def compute_row_losses(margins: np.ndarray, labels: np.ndarray, target: TableTarget) -> np.ndarray:
    """Return the loss of each row, in the precision of the margins. For rankings see `sum_ndcg`."""
    first = margins[:, 0]
    match target.task:
        case Task.BINARY:
            against = first * (1 - 2 * labels)
            return np.maximum(against, 0) + np.log(1 + np.exp(-np.abs(against)))
        case Task.CLASSES:
            lower = margins - margins.max(1, keepdims=True)
            of_label = np.take_along_axis(lower, labels.astype(np.int64)[:, None], 1)[:, 0]
            return np.log(np.exp(lower).sum(1)) - of_label
        case Task.COUNT:
            return np.exp(first) - labels * first + torch.lgamma(torch.as_tensor(labels + 1)).numpy()
    return (first - labels) ** 2


def sum_losses(
    margins: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, target: TableTarget
) -> tuple[float, float]:
    total = 0.0
    for first in range(0, len(labels), LOSS_ROWS):
        some = slice(first, first + LOSS_ROWS)
        found = compute_row_losses(margins[some], labels[some], target)
        total += float((found if weights is None else found * weights[some]).sum(dtype=np.float64))
    return total, float(len(labels) if weights is None else weights.sum(dtype=np.float64))


def sum_ndcg(scores: np.ndarray, labels: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
    """Sum NDCG over the queries that begin at these rows.

    A query without a relevant row counts as ranked perfectly, as in XGBoost and LightGBM.
    """
    queries = np.searchsorted(starts, np.arange(len(labels)), side="right") - 1
    gains = 2.0 ** labels.astype(np.float64) - 1
    place = np.arange(len(labels)) - starts[queries]
    discount = 1 / np.log2(place + 2)
    by_score, by_gain = (gains[np.lexsort((-key, queries))] for key in (scores, gains))
    ndcg = []
    for counted in (discount, discount * (place < NDCG_PLACES)):
        got, best = (np.bincount(queries, order * counted, len(starts)) for order in (by_score, by_gain))
        ndcg.append(np.divide(got, best, out=np.ones(len(starts)), where=best > 0))
    return {"loss": float((1 - ndcg[0]).sum()), "ndcg_at_10": float(ndcg[1].sum()), "weight": len(starts)}


class HeldOutRows:
    """A rank's chunks of the held-out rows; a query is in one chunk."""

    def __init__(self, split: RowSplit, target: TableTarget, rank: int, world: int) -> None:
        edges = np.append(np.arange(0, len(split), CHUNK), len(split))
        if split.queries is not None:
            ends = np.append(split.queries, len(split))
            edges = np.unique(ends[np.searchsorted(ends, edges)])
        count = len(edges) - 1
        self.split, self.target, self.edges = split, target, edges
        self.mine = range(count * rank // world, count * (rank + 1) // world)

    @property
    def rows(self) -> slice:
        return slice(int(self.edges[self.mine.start]), int(self.edges[self.mine.stop]))

    def metrics(self, margins: np.ndarray) -> dict[str, Any]:
        mine, begin = ChunkSums(), self.rows.start
        for chunk in self.mine:
            first, last = int(self.edges[chunk]), int(self.edges[chunk + 1])
            mine.add(chunk, self._sum_chunk(margins[first - begin : last - begin], slice(first, last)))
        sums = sum_chunks(gather_objects(mine), len(self.edges) - 1)
        rows = len(self.split)
        return {"n": rows, "of": rows, "loss": sums["loss"] / sums["weight"], **_compute_metrics(sums, self.target)}

    def _sum_chunk(self, margins: np.ndarray, rows: slice) -> dict[str, Any]:
        """Sum over the rows of a chunk. Weights count in the loss, and in the metrics of numbers."""
        labels, scores = self.target.labels(self.split.y[rows]), margins.astype(np.float64)
        if self.split.queries is not None and self.target.task is Task.RANKING:
            starts = self.split.queries
            own = starts[np.searchsorted(starts, rows.start) : np.searchsorted(starts, rows.stop)]
            return sum_ndcg(scores[:, 0], labels, own - rows.start)
        weights = None if self.split.weights is None else np.asarray(self.split.weights[rows], np.float64)
        loss, weight = sum_losses(scores, labels, weights, self.target)
        sums = {"loss": loss, "weight": weight}
        if self.target.task is Task.BINARY:
            return sums | sum_two_classes(scores[:, 0], labels.astype(np.int64))
        if self.target.task is Task.CLASSES:
            return sums | class_sums(torch.from_numpy(scores), torch.from_numpy(labels).long())
        each = 1.0 if weights is None else weights
        truth = labels.astype(np.float64)
        error = predict_from_margins(margins, self.target) - truth
        terms = {"squares": error**2, "apart": np.abs(error), "truth": truth, "truth2": truth**2}
        return sums | {name: float((each * value).sum()) for name, value in terms.items()}


def _compute_metrics(sums: dict[str, Any], target: TableTarget) -> dict[str, Any]:
    if target.task is Task.RANKING:
        return {"ndcg": 1 - sums["loss"] / sums["weight"], "ndcg_at_10": sums["ndcg_at_10"] / sums["weight"]}
    if target.classes:
        return {**list_class_metrics(sums), "classes": list(target.classes)}
    weight = sums["weight"]
    mean_square = sums["squares"] / weight
    variance = sums["truth2"] / weight - (sums["truth"] / weight) ** 2
    explained = {"r2": 1 - mean_square / variance} if variance > 0 else {}
    return {"rmse": mean_square**0.5, "mae": sums["apart"] / weight, **explained}


class CustomMetric:
    """The user's own function of the labels and the predictions of all held-out rows; the main rank calls it."""

    def __init__(self, reference: str, function: Callable[..., Any]) -> None:
        self.reference, self.function, self.name = reference, function, reference.rpartition(":")[2]

    def evaluate(self, held_out: HeldOutRows, margins: np.ndarray) -> float:
        margins = np.concatenate(gather_objects(margins))
        return broadcast_from_main(lambda: self._call_user_metric(held_out, margins))

    def _call_user_metric(self, held_out: HeldOutRows, margins: np.ndarray) -> float:
        """Call the function: classes are numbers from 0; of two, a prediction is the probability of the second."""
        predicted, target = predict_from_margins(margins, held_out.target), held_out.target
        labels = target.labels(held_out.split.y).astype(np.int64 if target.classes else np.float32)
        with guard_user_code(METRIC_KEY, self.reference):
            value = self.function(labels, predicted[:, 1] if len(target.classes) == 2 else predicted)
        if not isinstance(value, Real) or not math.isfinite(value):
            message = f"{METRIC_KEY}: {self.reference} returned {value!r}, expected a finite number"
            raise InvalidValue(message, key=METRIC_KEY)
        return float(value)


def load_metric(reference: str | None) -> CustomMetric | None:
    if reference is None:
        return None
    return CustomMetric(reference, load_user_function(reference, METRIC_KEY))
