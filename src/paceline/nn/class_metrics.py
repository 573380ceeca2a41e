"""Sums over samples on the device, and accuracy, macro-F1 and AUC from the sums of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.io.files import replace_nonfinite

if TYPE_CHECKING:
    from torch import Tensor

CONFUSION = "confusion"  # (classes, classes): samples of each class (row) by predicted class (column)
COUNTS = "class_counts"  # (3, classes): samples, predictions, and both; of many classes
SCORES = "class_scores"  # (classes, 2, bins): how often others, and this one, got each log-odds
CLASS_SUMS = (CONFUSION, COUNTS, SCORES)
MOST_CLASSES = 100  # for which the confusion matrix and the AUC are worth their memory
FARTHEST, PER_UNIT = 16, 64  # log-odds are counted from -16 to 16, in steps of 1/64
BINS = 2 * FARTHEST * PER_UNIT + 1


def count_confusion(labels: Tensor, said: Tensor, classes: int) -> Tensor:
    """Return (classes, classes): how many of each class (row) were predicted as which (column)."""
    return (labels * classes + said).bincount(minlength=classes**2).view(classes, classes)


def class_sums(logits_BC: Tensor, labels_B: Tensor) -> dict[str, Tensor]:
    """Return what `compute_class_metrics` needs of a batch; labels below 0 do not count."""
    import torch

    classes = logits_BC.shape[1]
    logits_BC, labels_B = logits_BC[labels_B >= 0], labels_B[labels_B >= 0]
    said_B = logits_BC.argmax(1)
    if classes > MOST_CLASSES:
        parts = (labels_B, said_B, labels_B[said_B == labels_B])
        return {COUNTS: torch.stack([torch.bincount(part, minlength=classes) for part in parts])}
    sums = {CONFUSION: count_confusion(labels_B, said_B, classes)}
    if classes > 1:
        logs_BC = logits_BC.double().log_softmax(1)
        odds_BC = logs_BC - torch.log(-torch.expm1(logs_BC))
        bins_BC = ((odds_BC.clamp(-FARTHEST, FARTHEST) + FARTHEST) * PER_UNIT).round().nan_to_num().long()
        each_C = torch.arange(classes, device=logits_BC.device)
        own_BC = (labels_B[:, None] == each_C).long()
        places = (2 * each_C + own_BC) * BINS + bins_BC
        sums[SCORES] = torch.bincount(places.flatten(), minlength=2 * classes * BINS).view(classes, 2, BINS)
    return sums


def sum_two_classes(odds_B: np.ndarray, labels_B: np.ndarray) -> dict[str, np.ndarray]:
    """Return the same for two classes, from the log-odds of the second."""
    said_B = (odds_B > 0).astype(np.int64)
    bins_B = np.rint((np.clip(np.nan_to_num(odds_B), -FARTHEST, FARTHEST) + FARTHEST) * PER_UNIT).astype(np.int64)
    first_N, second_N = np.bincount(labels_B * BINS + bins_B, minlength=2 * BINS).reshape(2, BINS)
    scores = np.stack([np.stack([second_N[::-1], first_N[::-1]]), np.stack([first_N, second_N])])
    return {CONFUSION: np.bincount(labels_B * 2 + said_B, minlength=4).reshape(2, 2), SCORES: scores}


def compute_class_metrics(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics of all samples, and arrays with those of each class; {} where the sums are not of classes.

    Macro-F1 is the mean over the classes that occur, AUC that over the classes that some samples have and some do not
    (one against the rest). "majority" is the accuracy of always predicting the most frequent class.
    """
    if CONFUSION in sums:
        table = np.asarray(sums[CONFUSION])
        support, said, right = table.sum(1), table.sum(0), table.diagonal()
    elif COUNTS in sums:
        support, said, right = np.asarray(sums[COUNTS])
    else:
        return {}
    occurs, total = support + said > 0, support.sum()
    f1 = _ratio(2 * right, support + said)
    found: dict[str, Any] = {"accuracy": float(right.sum() / total), "macro_f1": float(f1[occurs].mean())}
    if SCORES in sums:
        auc = _auc(np.asarray(sums[SCORES], np.float64))
        if np.isfinite(auc).any():
            found["auc"] = float(np.nanmean(auc))
    found["majority"] = float(support.max() / total)
    each = {"precision": _ratio(right, said), "recall": _ratio(right, support), "f1": f1, "support": support}
    return {**found, **each, **({CONFUSION: table} if CONFUSION in sums else {})}


def list_class_metrics(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return `compute_class_metrics` as JSON values."""
    metrics = compute_class_metrics(sums).items()
    return replace_nonfinite({name: value.tolist() if hasattr(value, "tolist") else value for name, value in metrics})


def _auc(counts_C2N: np.ndarray) -> np.ndarray:
    """Return how often a sample of each class scores above one of the others; equal ones count half."""
    others_CN, own_CN = counts_C2N[:, 0], counts_C2N[:, 1]
    below_CN = np.cumsum(others_CN, 1) - others_CN / 2
    return _ratio((own_CN * below_CN).sum(1), own_CN.sum(1) * others_CN.sum(1))


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Divide, with NaN where there is nothing to divide by."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
