"""Handwritten digits by a small CNN: a Dataset with a random transform, and a loop of one's own."""

import gzip
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline

FOLDER = Path("data/mnist")


def read(name):
    with gzip.open(FOLDER / f"{name}.gz") as file:
        dimensions = file.read(4)[3]
        shape = [int.from_bytes(file.read(4), "big") for _ in range(dimensions)]
        return np.frombuffer(file.read(), np.uint8).reshape(shape)


def shifted(image):
    return torch.roll(image, (random.randint(-2, 2), random.randint(-2, 2)), (1, 2))


class MNIST(Dataset):
    def __init__(self, split, transform=None):
        name = "train" if split == "train" else "t10k"
        self.images, self.labels = read(f"{name}-images.idx3-ubyte"), read(f"{name}-labels.idx1-ubyte")
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.tensor(self.images[index], dtype=torch.float32)[None] / 255
        return self.transform(image) if self.transform else image, int(self.labels[index])


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def main():
    torch.manual_seed(0)
    train_set, test_set = MNIST("train", shifted), MNIST("test")
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with paceline.run("pytorch_after.yaml") as run:
        model, optimizer = run.prepare(model, optimizer)
        for x, y in run.batches(train_set, workers=2):
            run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))
        run.evaluate(test_set, lambda x, y: {"accuracy": (model(x).argmax(1) == y).sum(), "count": len(y)})


if __name__ == "__main__":
    main()
