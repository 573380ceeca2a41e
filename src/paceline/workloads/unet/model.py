"""The UNet: down and up again, with what each level found handed across."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.workloads.unet.sections import UNetModel

GROUPS = 8


class Block(nn.Sequential):
    """Convolution, norm and ReLU, twice. A bias before a norm would be taken out again, so there is none."""

    def __init__(self, given: int, channels: int, norm: str) -> None:
        layers: list[nn.Module] = []
        for c in (given, channels):
            layers += [nn.Conv2d(c, channels, 3, padding=1, bias=False), _norm(norm, channels), nn.ReLU()]
        super().__init__(*layers)


def _norm(kind: str, channels: int) -> nn.Module:
    """Statistics of one sample do not depend on who shares a pass with it; those of a batch do."""
    if kind == "sync_batch":
        return nn.SyncBatchNorm(channels)
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


def _channels_last(x: Tensor) -> Tensor:
    """The copy has these strides also where there is one channel, which torch would take for either format."""
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


class UNet(nn.Module):
    """Images [B, C, H, W] with values from 0 to 255 in, a logit for each class and pixel out.

    H and W must be multiples of 2^depth.
    """

    def __init__(self, shape: UNetModel, channels: int, classes: int) -> None:
        super().__init__()
        self.channels_last = shape.channels_last
        widths = [shape.width * 2**level for level in range(shape.depth + 1)]
        levels = list(pairwise(widths))
        self.down = nn.ModuleList(Block(a, b, shape.norm) for a, b in zip([channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(levels))
        self.join = nn.ModuleList(Block(2 * a, a, shape.norm) for a, _ in reversed(levels))
        self.head = nn.Conv2d(shape.width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(self.head.weight.dtype) / 127.5 - 1
        if self.channels_last == "on" or (self.channels_last == "auto" and x.is_cuda):
            x = _channels_last(x)
        levels = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            levels.append(x)
        levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), levels.pop()], 1))
        return self.head(x)
