"""How well a mask was found: the loss of each sample by itself, and what is counted to judge all of them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.classification import confusion
from paceline.workloads.unet.corpus import IGNORED


def losses(logits_BKHW: Tensor, masks_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """(cross entropy + 1 - dice, whether it counts) of each sample.

    Dice over a batch would depend on which samples are in it; so would a mean over all pixels.
    """
    counts = masks_BHW != IGNORED
    pixels = counts.sum((1, 2))
    labels = masks_BHW.long()
    entropy = F.cross_entropy(logits_BKHW, labels, ignore_index=IGNORED, reduction="none").sum((1, 2))
    dice = soft_dice(logits_BKHW.softmax(1), labels, counts)
    there = pixels > 0
    return torch.where(there, entropy / pixels.clamp(min=1) + 1 - dice, 0.0), there


def soft_dice(chances_BKHW: Tensor, labels_BHW: Tensor, counts_BHW: Tensor) -> Tensor:
    """Of each sample: the mean over the classes that are in it."""
    truth = members(labels_BHW, chances_BKHW.shape[1]).to(chances_BKHW.dtype)
    chances = chances_BKHW * counts_BHW[:, None]
    both, size = (chances * truth).sum((2, 3)), chances.sum((2, 3)) + truth.sum((2, 3))
    present = truth.sum((2, 3)) > 0
    return (((2 * both + 1) / (size + 1)) * present).sum(1) / present.sum(1).clamp(min=1)


def members(labels_BHW: Tensor, classes: int) -> Tensor:
    """[B, K, H, W]: whether a pixel is of a class."""
    return labels_BHW[:, None] == torch.arange(classes, device=labels_BHW.device)[:, None, None]


def confused_pixels(found_BHW: Tensor, masks_BHW: Tensor, classes: int) -> Tensor:
    """[K, K]: how many pixels of each class (row) were taken for which (column)."""
    counts = masks_BHW != IGNORED
    return confusion(masks_BHW[counts].long(), found_BHW[counts].long(), classes)


def scores(confusion_KK: NDArray[np.int64]) -> dict[str, float]:
    """Dice and IoU: the mean over the classes but the first, which is the background; and the share of right pixels.

    A class that is neither in the truth nor found is left out. "background" is the accuracy of saying "background"
    everywhere: most pixels are, and a model can find much and yet have no higher accuracy.
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
