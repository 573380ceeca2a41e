"""What the run file of a segmentation says of its model and its images."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from paceline.config.sections import ModelSection, Section, conflict_error, field


class UNetModel(ModelSection):
    """Blocks of two convolutions, halving the image `depth` times and doubling it again, joined level by level."""

    width: int = field(16, "channels", "of the first level; each level below has twice as many", gt=0, le=65536)
    depth: int = field(3, "levels", "how often the image is halved", gt=0, le=8)
    norm: Literal["group", "sync_batch"] = field("group", "", "of each sample; sync_batch: of a pass over all ranks")
    channels_last: Literal["auto", "on", "off"] = field("auto", "", "memory format; auto is on with CUDA")


class ImageData(Section):
    """Images with a mask each, prepared once as memory-mapped bytes."""

    source: Literal["scenes", "folder"] = field(
        "scenes", "", "scenes of digits; folder: images/NAME.png, masks/NAME.png"
    )
    path: Path | None = field(None, "path", "folder: where images/ and masks/ are")
    test_path: Path | None = field(None, "path", "held-out folder; without one, test_fraction is held out")
    test_fraction: float = field(0.1, "fraction", "images held out; of scenes, so many more are made", gt=0, lt=1)
    scenes: int = field(2000, "scenes", "to train on; a function of number and seed", gt=0, le=10**9)
    digits_per_scene: int = field(3, "digits", "on each scene, the later over the earlier ones", gt=0, le=100)
    seed: int = field(0, "", "of the scenes", ge=0, lt=1 << 31)
    size: int = field(64, "pixels", "side of a scene, or of the crops that are trained on", ge=8, le=16384)
    flip: Literal["none", "horizontal", "both"] = field("none", "", "random flips, drawn per sample and epoch")
    brightness: float = field(0.0, "fraction", "random change of brightness, drawn per sample and epoch", ge=0, lt=1)
    cache: Path = field(Path("~/.cache/paceline"), "path", "folder of prepared images, named by content")

    @model_validator(mode="after")
    def _path_fits(self) -> ImageData:
        if self.source == "folder" and self.path is None:
            raise conflict_error("data.source=folder needs data.path=FOLDER, with images/ and masks/")
        if self.source == "scenes" and self.size < 32:
            raise conflict_error(f"data.size={self.size}: a digit takes 28 pixels; use 32 or more for scenes")
        return self
