"""A model that knows nothing of ranks: tensor and pipeline parallelism find out themselves how it can be divided.

paceline check docs/examples/own_encoder.yaml --layouts single,tensor:2,pipeline:2,fsdp:2+tensor:2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload

NUMBERS = torch.randint(0, 100, (256, 12), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        layer = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layer)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embed(numbers)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))[:, 0]


class Encoder(Workload):
    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> Tensor:
        return NUMBERS[:192] if split == "train" else NUMBERS[192:]

    def loss(self, model: nn.Module, numbers: Tensor) -> tuple[Tensor, int]:
        mean = numbers.float().mean(1) / 50 - 1
        return F.mse_loss(model(numbers), mean, reduction="sum"), len(numbers)
