"""What people write today: nn.TransformerEncoder, every text padded to the longest allowed, a DataLoader, fp32.

It reads the same tokens in the same order as Paceline does, with the same optimiser, schedule and seed, so that speed
and loss can be put side by side.
"""

from __future__ import annotations

from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.config import RunSpec
from paceline.data.order import Order
from paceline.trainer.optim.schedule import build_schedule


class PaddedTexts(Dataset):
    def __init__(self, tokens, longest: int) -> None:
        self.tokens, self.longest = tokens, longest

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, int]:
        ids = torch.zeros(self.longest, dtype=torch.long)
        begin, end = self.tokens.offsets[i], self.tokens.offsets[i + 1]
        text = torch.from_numpy(self.tokens.ids[begin:end].astype("int64"))
        ids[: len(text)] = text
        return ids, torch.arange(self.longest) >= len(text), int(self.tokens.labels[i])


class UsualClassifier(nn.Module):
    def __init__(self, vocab: int, shape, longest: int, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, shape.width)
        self.positions = nn.Embedding(longest, shape.width)
        layer = nn.TransformerEncoderLayer(shape.width, shape.heads, shape.ffn, shape.dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, shape.layers)
        self.head = nn.Linear(shape.width, classes)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1)
        return self.head((x * keep).sum(1) / keep.sum(1))


def train_usual(spec: RunSpec, corpus, device: str, steps: int, workers: int) -> tuple[float, list[float]]:
    """(samples per second after a warm-up, loss of every step)"""
    train, order = spec.train, Order(len(corpus.train), spec.train.global_batch, spec.train.seed)
    batches = [order.global_batch(step).ids.tolist() for step in range(steps)]
    loader = DataLoader(PaddedTexts(corpus.train, spec.data.max_length), batch_sampler=batches, num_workers=workers)
    torch.manual_seed(train.seed)
    model = UsualClassifier(corpus.vocab, spec.model, spec.data.max_length, len(corpus.classes)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, weight_decay=train.weight_decay)
    schedule = build_schedule(train, order.seen(steps))
    losses, warm = [], max(3, steps // 10)
    began = perf_counter()
    for step, (ids, padding, labels) in enumerate(loader):
        if step == warm:
            began = perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = schedule(order.seen(step))
        loss = F.cross_entropy(model(ids.to(device), padding.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
        losses.append(loss.item())
    samples = order.seen(steps) - order.seen(warm)
    return samples / (perf_counter() - began), losses
