"""A classifier that wants more memory than any machine has, if it is given more than a few samples at a time."""

import torch

from paceline.workloads.classifier.workload import Classifier

ENOUGH = 6
"""Samples that it can do with."""
PER_SAMPLE_BYTES = 1 << 47


class Hungry(Classifier):
    def loss(self, model, batch):
        rows = len(batch.labels)
        if rows > ENOUGH:
            torch.empty(rows * PER_SAMPLE_BYTES, dtype=torch.uint8, device=batch.labels.device)
        return super().loss(model, batch)
