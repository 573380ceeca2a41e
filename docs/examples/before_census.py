"""Who earns more than 50K: a table of numbers and categories, embeddings and a small network."""

import csv
import gzip

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUMBERS = ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
CATEGORIES = ["workclass", "marital_status", "occupation", "relationship", "sex"]


def read(split):
    with gzip.open(f"data/adult_census/adult_{split}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def tensors(split):
    known = read("train")
    words = {name: sorted({row[name] for row in known}) for name in CATEGORIES}
    rows = known if split == "train" else read(split)
    numbers = torch.tensor([[float(row[name]) for name in NUMBERS] for row in rows])
    codes = torch.tensor([[words[name].index(row[name]) for name in CATEGORIES] for row in rows])
    return numbers.log1p(), codes, torch.tensor([row["income"] == ">50K" for row in rows]).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(32, 8) for _ in CATEGORIES)
        self.layers = nn.Sequential(nn.Linear(len(NUMBERS) + 8 * len(CATEGORIES), 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, numbers, codes):
        words = [embedding(codes[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *words], 1))


def main():
    torch.manual_seed(0)
    train_loader = DataLoader(TensorDataset(*tensors("train")), batch_size=256, shuffle=True)
    test_loader = DataLoader(TensorDataset(*tensors("test")), batch_size=1024)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(5):
        model.train()
        for numbers, codes, y in train_loader:
            loss = F.cross_entropy(model(numbers, codes), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(n, c).argmax(1) == y).sum()) for n, c, y in test_loader)
        print(f"epoch {epoch}: accuracy {right / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    main()
