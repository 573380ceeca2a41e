"""A diffusion model of digits, as a workload of its own: the UNet learns to take noise away, and then draws from noise.

paceline train docs/examples/diffusion.yaml
paceline check docs/examples/diffusion.yaml --ranks 1,2 --steps 5
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from paceline import Workload
from paceline.config import Section, field
from paceline.workloads.unet.sections import UNetModel
from paceline.workloads.unet.sources import DRAWS, draw_digit
from paceline.workloads.unet.workload import UNet

SIDE = 32


class DigitData(Section):
    """The section `data:` of the run file."""

    digits: int = field(2000, "samples", "digits to train on; an eighth as many are held out", ge=8)


class NoisyDigits:
    """Digits with noise. How much and which is drawn from the key of a sample: the same on any rank."""

    def __init__(self, count: int, seed: int) -> None:
        numbers = np.random.default_rng(seed).random((count, DRAWS))
        digits = [np.pad(draw_digit(i % 10, some), 2) for i, some in enumerate(numbers)]
        self.images = torch.from_numpy(np.stack(digits))[:, None] * 2 - 1

    def __len__(self) -> int:
        return len(self.images)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return np.ones(len(ids))

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        drawn = [np.random.default_rng(pair) for pair in zip(keys, ids, strict=True)]
        times = torch.tensor([one.random() for one in drawn], dtype=torch.float32)
        noise = torch.from_numpy(np.stack([one.standard_normal((1, SIDE, SIDE), np.float32) for one in drawn]))
        return self.images[ids], noise, times


class Denoiser(nn.Module):
    """Says which velocity brings a noisy image back; the time is a second channel."""

    def __init__(self, shape: UNetModel) -> None:
        super().__init__()
        self.unet = UNet(shape, channels=2, classes=1)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        clock = (2 * times - 1)[:, None, None, None].expand_as(noisy)
        return self.unet(127.5 * (torch.cat([noisy, clock], 1) + 1))


def parts(times: Tensor) -> tuple[Tensor, Tensor]:
    """How much of an image and how much noise there is at a time: all image at 0, all noise at 1."""
    angle = times[:, None, None, None] * math.pi / 2
    return angle.cos(), angle.sin()


class Diffusion(Workload):
    Model, Data = UNetModel, DigitData

    def model(self) -> nn.Module:
        return Denoiser(self.spec.model)

    def data(self, split: str) -> NoisyDigits:
        count = self.spec.data.digits
        return NoisyDigits(count, seed=1) if split == "train" else NoisyDigits(count // 8, seed=2)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
        image, noise, times = batch
        a, b = parts(times)
        found = model(a * image + b * noise, times)
        return ((found - (a * noise - b * image)) ** 2).mean((1, 2, 3)).sum(), len(image)

    def pictures(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, np.ndarray]:
        """Sixteen new digits, from noise that is the same each time."""
        device, steps = batch[0].device, 25
        x = torch.randn(16, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0)).to(device)
        for step in range(steps, 0, -1):
            now, then = (torch.full((16,), s / steps, device=device) for s in (step, step - 1))
            (a, b), (next_a, next_b) = parts(now), parts(then)
            velocity = model(x, now).float()
            image, noise = (a * x - b * velocity).clamp(-1, 1), b * x + a * velocity
            x = next_a * image + next_b * noise
        grid = (127.5 * (x + 1)).clamp(0, 255).byte().view(2, 8, SIDE, SIDE).transpose(1, 2).reshape(2 * SIDE, 8 * SIDE)
        return {"drawn": np.repeat(grid.cpu().numpy()[..., None], 3, axis=2)}
