"""Losses, metrics and pictures of predicted masks."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.nn.class_metrics import count_confusion
from paceline.trainer.evaluation import build_palette
from paceline.workloads.unet.corpus import IGNORED, Pixels


def compute_losses(logits_BKHW: Tensor, masks_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cross entropy + 1 - dice, whether it counts) per sample, independent of the rest of the batch."""
    counts = masks_BHW != IGNORED
    pixels = counts.sum((1, 2))
    labels = masks_BHW.long()
    entropy = F.cross_entropy(logits_BKHW, labels, ignore_index=IGNORED, reduction="none").sum((1, 2))
    dice = compute_soft_dice(logits_BKHW.softmax(1), labels, counts)
    there = pixels > 0
    return torch.where(there, entropy / pixels.clamp(min=1) + 1 - dice, 0.0), there


def compute_soft_dice(chances_BKHW: Tensor, labels_BHW: Tensor, counts_BHW: Tensor) -> Tensor:
    classes_K11 = torch.arange(chances_BKHW.shape[1], device=labels_BHW.device)[:, None, None]
    truth = (labels_BHW[:, None] == classes_K11).to(chances_BKHW.dtype)
    chances = chances_BKHW * counts_BHW[:, None]
    both, size = (chances * truth).sum((2, 3)), chances.sum((2, 3)) + truth.sum((2, 3))
    present = truth.sum((2, 3)) > 0
    return (((2 * both + 1) / (size + 1)) * present).sum(1) / present.sum(1).clamp(min=1)


def count_confused_pixels(found_BHW: Tensor, masks_BHW: Tensor, classes: int) -> Tensor:
    """Return [K, K]: pixels of each class (row) by predicted class (column)."""
    counts = masks_BHW != IGNORED
    return count_confusion(masks_BHW[counts].long(), found_BHW[counts].long(), classes)


def compute_scores(confusion_KK: NDArray[np.int64]) -> dict[str, float]:
    """Return dice and IoU, means over the classes that occur but the background, and the share of correct pixels.

    "background" is the accuracy of predicting it everywhere.
    """
    truth, found, both = confusion_KK.sum(1), confusion_KK.sum(0), confusion_KK.diagonal()
    there = truth + found > 0
    there[0] = False
    truth_or_found = (truth + found - both)[there]
    return {
        "dice": float((2 * both[there] / (truth + found)[there]).mean()) if there.any() else 0.0,
        "iou": float((both[there] / truth_or_found).mean()) if there.any() else 0.0,
        "accuracy": float(both.sum() / max(truth.sum(), 1)),
        "background": float(truth[0] / max(truth.sum(), 1)),
    }


GAP = 2
SHOWN_SIDE = 128  # smaller images are enlarged to about this


def draw_side_by_side(images: Pixels, truth: Pixels, found: Pixels) -> Pixels:
    """Return one row per sample: image, mask, predicted mask; pixels that do not count are grey in both."""
    palette, rows = build_palette(), []
    for image, mask, predicted in zip(images, truth, np.where(truth == IGNORED, truth, found), strict=True):
        colour = image if image.shape[2] == 3 else np.repeat(image[..., :1], 3, axis=2)
        rows.append(np.concatenate([*map(_add_frame, (colour, palette[mask], palette[predicted]))], axis=1))
    return np.concatenate(rows)


def _add_frame(picture: Pixels) -> Pixels:
    times = max(1, SHOWN_SIDE // max(picture.shape[:2]))
    large = picture.repeat(times, axis=0).repeat(times, axis=1)
    return np.pad(large, ((GAP, GAP), (GAP, GAP), (0, 0)), constant_values=255)
