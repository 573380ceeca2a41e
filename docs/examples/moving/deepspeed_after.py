"""Points in eight clouds, classified by a small network: the run file says what DeepSpeed's JSON said."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def clouds():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (512,), generator=draw)
    centres = torch.randn(8, 16, generator=draw)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(512, 16, generator=draw), labels)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    with paceline.run("deepspeed_after.yaml") as run:
        model, _ = run.prepare(model)
        for x, y in run.batches(clouds()):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            run.step(loss, len(y))
    print(f"loss {loss.item() / len(y):.4f}")


if __name__ == "__main__":
    main()
