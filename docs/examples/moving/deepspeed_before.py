"""Points in eight clouds, classified by a small network: DeepSpeed's engine, configured by its JSON."""

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def clouds():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (512,), generator=draw)
    centres = torch.randn(8, 16, generator=draw)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(512, 16, generator=draw), labels)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=clouds(), config="deepspeed_before.json"
    )
    for _epoch in range(4):
        for x, y in loader:
            loss = F.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
