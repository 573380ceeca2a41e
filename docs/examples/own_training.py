"""Training as you do it: groups of parameters, an optimiser, a schedule and callbacks of your own.

paceline train docs/examples/own_training.yaml
paceline check docs/examples/own_training.yaml --layouts single,ddp:2,zero1:2,fsdp:2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(2, 32)
        nn.init.normal_(self.features.weight, std=2.0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.features(x.to(self.head.weight.dtype)))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


class OwnTraining(Workload):
    def model(self) -> nn.Module:
        return Network()

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1 if split == "train" else 2)
        x = torch.rand(1000 if split == "train" else 120, 2, generator=draw) * 2 - 1
        return x, torch.sin(3 * x[:, :1]) * x[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(y)

    def groups(self, model: nn.Module) -> Mapping[str, Mapping[str, Any]]:
        return {"features.*": {"frozen": True}, "head.*": {"lr": 1e-3, "weight_decay": 0.0}}

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.NAdam(groups, betas=(0.9, 0.99))

    def schedule(self, seen: int, total: int) -> float:
        return min(1.0, 10 * seen / total, 2 * (1 - seen / total))

    def on_step(self, step: int, values: Mapping[str, Any]) -> str | None:
        low = values["loss"] < 0.01
        self.callback_state["low"] = self.callback_state.get("low", 0) + 1 if low else 0
        return "the loss was below 0.01 for 5 steps" if self.callback_state["low"] == 5 else None

    def on_evaluate(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        return "the test loss is 20 times that of the last evaluation" if self._risen(metrics["loss"]) else None

    def _risen(self, loss: float) -> bool:
        before = self.callback_state.get("test_loss", loss)
        self.callback_state["test_loss"] = loss
        return loss > 20 * before
