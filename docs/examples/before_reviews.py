"""Is a review a good one: a CSV of texts, a vocabulary of words, and batches padded to their longest text."""

import csv
import gzip
import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

FILE = "data/amazon_reviews_2023/reviews_sample.csv.gz"


def words_of(text):
    return re.findall(r"[a-z']+", text.lower())


class Reviews(Dataset):
    def __init__(self, split):
        with gzip.open(FILE, "rt") as file:
            rows = list(csv.DictReader(file))
        counts = Counter(word for row in rows for word in words_of(row["text"]))
        self.place = {word: number for number, (word, _) in enumerate(counts.most_common(9_999), 1)}
        self.rows = [row for i, row in enumerate(rows) if (i % 10 == 0) == (split == "test")]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        numbers = [self.place.get(word, 0) for word in words_of(row["text"])][:200]
        return torch.tensor(numbers or [0]), int(float(row["rating"]) >= 4)


def padded(samples):
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(texts, batch_first=True), torch.tensor(labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10_000, 32, padding_idx=0)
        self.head = nn.Linear(32, 2)

    def forward(self, texts):
        known = (texts > 0).sum(1, keepdim=True).clamp(min=1)
        return self.head(self.embedding(texts).sum(1) / known)


def main():
    torch.manual_seed(0)
    train_loader = DataLoader(Reviews("train"), batch_size=32, shuffle=True, collate_fn=padded)
    test_loader = DataLoader(Reviews("test"), batch_size=256, collate_fn=padded)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(5):
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test_loader)
        print(f"epoch {epoch}: accuracy {right / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    main()
