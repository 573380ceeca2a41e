"""Handwritten digits by a small network, in a loop with Accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    torch.manual_seed(0)
    images, classes = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes))
    train_set, test_set = Subset(digits, range(1500)), Subset(digits, range(1500, len(digits)))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for _epoch in range(2):
        for x, y in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    right = 0
    for x, y in test_loader:
        with torch.no_grad():
            guesses, labels = accelerator.gather_for_metrics((model(x).argmax(1), y))
        right += int((guesses == labels).sum())
    accelerator.print(f"accuracy {right / len(test_set):.4f}")


if __name__ == "__main__":
    main()
