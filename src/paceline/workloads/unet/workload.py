"""Segmentation: a UNet predicts the class of every pixel."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunSpec
from paceline.data.files import invalid_data
from paceline.errors import UserError, reject_value
from paceline.inference.export import write_standalone
from paceline.io.files import read_json, validate_fields, write_json
from paceline.io.format import plural
from paceline.layout import Layout
from paceline.nn.class_metrics import count_confusion
from paceline.parallel.precision import to_at_least_fp32
from paceline.trainer.evaluation import build_palette
from paceline.workload import LogFn, Outline, Workload, ignore_log
from paceline.workloads.unet.corpus import (
    IGNORED,
    Crops,
    ImageBatch,
    ImageCorpus,
    ImageKind,
    Pixels,
    Tiles,
    iter_tiles,
    make_crops,
    prepare_images,
)
from paceline.workloads.unet.sections import ImageData, UNetModel
from paceline.workloads.unet.sources import FolderSource, SceneSource, read_image
from paceline.workloads.unet.standalone import ExportedUNet

OUTLINE_SIDE, LOWEST_SIDE = 32, 2  # pixels of the images that a plan runs, and of their lowest level
EVALUATED_PIXELS = 1 << 17  # in one pass
KEPT = "images.json"
GAP, SHOWN_SIDE = 2, 128  # pixels between pictures; smaller images are enlarged to about this side
SHOWN_SHARE = 0.001  # of an image: classes with fewer pixels are not listed


class UNet(ExportedUNet):
    """Images [B, C, H, W] with values from 0 to 255 in, a logit for each class and pixel out.

    H and W must be multiples of 2^depth.
    """

    def __init__(self, shape: UNetModel, channels: int, classes: int) -> None:
        sizes = shape.model_dump(include={"width", "depth", "norm"})
        super().__init__({**sizes, "channels": channels, "classes": range(classes)})
        self.channels_last = shape.channels_last

    def build_norm(self, kind: str, channels: int) -> nn.Module:
        return nn.SyncBatchNorm(channels) if kind == "sync_batch" else super().build_norm(kind, channels)

    def scale(self, images: Tensor) -> Tensor:
        x = super().scale(images)
        if self.channels_last == "off" or (self.channels_last == "auto" and not x.is_cuda):
            return x
        # a copy has these strides also if there is one channel, which torch would take for either format
        return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


class Segmentation(Workload):
    Model = UNetModel
    Data = ImageData
    score = "dice"

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.shape, self.images = cast(UNetModel, spec.model), cast(ImageData, spec.data)
        size, step = self.images.size, 2**self.shape.depth
        if size % step:
            near = " or ".join(str(side) for side in (size // step * step, -(-size // step) * step) if side)
            raise reject_value("data.size", size, f"cannot be halved {self.shape.depth} times; use {near}", "conflict")
        self.evaluation_chunk = max(1, EVALUATED_PIXELS // size**2)

    def prepare(self, log: LogFn) -> None:
        self.corpus = prepare_images(self._source(), self.images.source, self.images.cache, log)

    @cached_property
    def corpus(self) -> ImageCorpus:  # `prepare` has verified it, for all ranks
        return prepare_images(self._source(), self.images.source, self.images.cache, ignore_log, verify=False)

    def _source(self) -> SceneSource | FolderSource:
        return SceneSource(self.images) if self.images.source == "scenes" else FolderSource(self.images)

    def outline(self) -> Outline:
        """Return black images, smaller than real ones, that take no memory."""
        seen = self._source().summarise()
        self.kind = seen.kind
        size, depth = self.images.size, self.shape.depth
        small = min(size, max(OUTLINE_SIDE, LOWEST_SIDE * 2**depth))
        black = torch.zeros((), dtype=torch.uint8)
        images = black.expand(seen.train, seen.kind.channels, small, small), black.expand(seen.train, small, small)
        return Outline(images, seen.tiles, (size / small) ** 2, seen.assumptions)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @cached_property
    def kind(self) -> ImageKind:
        """Channels and classes; of an opened run those that it kept, as its images may be gone."""
        if self.kept is None:
            return self.corpus.kind
        try:
            return ImageKind(**validate_fields(ImageKind, read_json(self.kept / KEPT)))
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{self.kept / KEPT} is damaged ({error})", code="damaged") from None

    def keep(self, folder: Path) -> None:
        write_json(folder / KEPT, asdict(self.kind))

    def classes(self) -> Sequence[str]:
        return self.kind.classes

    def model(self) -> UNet:
        return UNet(self.shape, self.kind.channels, len(self.kind.classes))

    def data(self, split: str) -> Crops | Tiles:
        if split == "train":
            return make_crops(self.corpus.train, self.images)
        return Tiles(self.corpus.test, self.images.size)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        net = cast(UNet, model)
        return [*net.down, *net.join]

    def suits(self, layout: Layout) -> None:
        super().suits(layout)
        if layout.tensor > 1:
            raise self._reject_axis("tensor", layout.tensor, "has no linear layers to divide; use parallel.pipeline")
        on_cpu = self.spec.parallel.device == "cpu" or not torch.cuda.is_available()
        if self.shape.norm == "sync_batch" and layout.ranks > 1 and on_cpu:
            raise UserError("model.norm=sync_batch needs CUDA; use model.norm=group", code="not-supported")

    def loss(self, model: nn.Module, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        images, masks = batch
        each, there = compute_losses(to_at_least_fp32(model(images)), masks)
        return each.sum(), there.sum()

    def evaluate(self, model: nn.Module, batch: ImageBatch) -> Mapping[str, Tensor | float]:
        images, masks = batch
        logits = to_at_least_fp32(model(images))
        each, there = compute_losses(logits, masks)
        pixels = count_confused_pixels(logits.argmax(1), masks, logits.shape[1])
        return {"loss": each.double().sum(), "count": there.sum(), "pixels": pixels}

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        return {"loss": sums["loss"] / sums["count"], **compute_scores(sums["pixels"])}

    def pictures(self, model: nn.Module, batch: ImageBatch) -> Mapping[str, Pixels]:
        images, masks = batch
        found = model(images).argmax(1).to(torch.uint8)
        parts = (images.permute(0, 2, 3, 1), masks, found)
        return {"image_truth_found": draw_side_by_side(*(part.cpu().numpy() for part in parts))}

    def encode(self, inputs: Sequence[Any]) -> list[Tensor]:
        images, channels = [], self.kind.channels
        for number, given in enumerate(inputs, 1):
            if isinstance(given, Mapping):
                raise UserError("this model takes images, not the rows of a table; give image files")
            file = isinstance(given, str | Path)
            image = read_image(Path(given)) if file else np.asarray(given)
            image = image if image.ndim == 3 else image[..., None]
            if image.ndim != 3 or not image.size or image.shape[2] != channels or image.dtype != np.uint8:
                found = f"{given if file else f'image {number}'} is {image.dtype} of shape {list(image.shape)}"
                raise invalid_data(f"{found}; expected 8 bits and {plural(channels, 'channel')}")
            images.append(torch.from_numpy(image.transpose(2, 0, 1).copy()))
        return images

    def predict(self, model: nn.Module, batch: Sequence[Tensor]) -> Mapping[str, Any]:
        """Return for each image its mask, the share of each class, and the mean probability of its pixels."""
        found = [self._predict_mask(model, image) for image in batch]
        masks = np.empty(len(found), object)  # of images that differ in size
        masks[:] = [mask.cpu().numpy() for mask, _ in found]
        return {
            "mask": masks,
            "found": np.array([self._list_classes(mask) for mask in masks]),
            "sure": [s for _, s in found],
        }

    def export(self, model: nn.Module, folder: Path) -> None:
        shape = self.shape.model_dump(include={"width", "depth", "norm"})
        config = {**shape, **asdict(self.kind), "size": self.images.size}
        write_standalone(folder, model.state_dict(), config, "paceline.workloads.unet.standalone")

    def onnx(self, model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
        shape = (2, self.kind.channels, self.images.size, self.images.size)
        return model, {"images": torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).byte()}

    def _predict_mask(self, model: nn.Module, image_CHW: Tensor) -> tuple[Tensor, float]:
        size, (height, width) = self.images.size, image_CHW.shape[1:]
        mask, sure = image_CHW.new_zeros((height, width)), 0.0
        for top, above, left, before in iter_tiles(height, width, size):
            part = image_CHW[:, top : top + size, left : left + size]
            rows, columns = part.shape[1:]
            logits = model(F.pad(part, (0, size - columns, 0, size - rows))[None])
            chances, classes = to_at_least_fp32(logits)[0, :, above:rows, before:columns].softmax(0).max(0)
            mask[top + above : top + rows, left + before : left + columns] = classes.to(torch.uint8)
            sure += float(chances.sum())
        return mask, sure / (height * width)

    def _list_classes(self, mask: Pixels) -> str:
        shares = np.bincount(mask.flat, minlength=len(self.kind.classes)) / mask.size
        largest = [k for k in np.argsort(-shares, kind="stable") if k and shares[k] >= SHOWN_SHARE]
        return ", ".join(f"{self.kind.classes[k]}: {100 * shares[k]:.1f} %" for k in largest)


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


def compute_scores(confusion_KK: np.ndarray) -> dict[str, float]:
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
