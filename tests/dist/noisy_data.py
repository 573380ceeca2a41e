"""A workload whose unmodified data set draws from every generator of the process: for tests of worker processes."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from paceline import Workload
from paceline.config import Section, field


class Trouble(Section):
    fails_at: int = field(-1, "sample", "that raises")
    kills_at: int = field(-1, "sample", "whose worker is killed, once", ge=-1)
    sleeps_s: float = field(0.0, "s", "that each sample takes")
    notes: str = field("", "path", "of a file where workers leave their process ids")


class Noisy(Dataset):
    def __init__(self, length, trouble):
        self.x = torch.randn(length, 6, generator=torch.Generator().manual_seed(1))
        self.trouble = trouble

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        trouble = self.trouble
        if trouble.notes:
            with open(trouble.notes, "a") as file:
                file.write(f"{os.getpid()}\n")
        if index == trouble.fails_at:
            raise ValueError("this sample cannot be read")
        if index == trouble.kills_at and not Path(f"{trouble.notes}.killed").exists():
            Path(f"{trouble.notes}.killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(trouble.sleeps_s)
        noise = torch.randn(6) + random.random() + np.random.rand()  # noqa: NPY002 - as people write it
        return self.x[index] + 0.1 * noise, self.x[index].sum()


class NoisyData(Workload):
    Data = Trouble

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))

    def data(self, split):
        return Noisy(53 if split == "train" else 11, self.spec.data)

    def loss(self, model, batch):
        torch.rand(3), random.random()  # the model's own use of the generators is not disturbed
        x, y = batch
        return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y)
