"""Handwritten digits by a small network, trained by Lightning."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def digits(split):
    images, classes = load_digits(return_X_y=True)
    all_digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes))
    return Subset(all_digits, range(1500) if split == "train" else range(1500, len(all_digits)))


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(digits("train"), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(digits("test"), batch_size=64)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False)
    trainer.fit(Digits())
    print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
