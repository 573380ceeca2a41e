"""What benchmarks/topics_gpu.py works on: counts drawn on the device, and the rival's loop.

The rival is tinytopics 0.9.3 (`fit_model` with its defaults), written down again because it cannot be installed
everywhere: factors under a softmax, minibatches of 16 documents, AdamW with weight decay 1e-5, a rate that falls from
0.05 to 0.01 along a cosine of 20 epochs and starts again, loss sum(p - x log p) with p not below 1e-10.
`their_epoch` is that loop line by line. `Lean` is the same arithmetic without what makes it slow and does not change
the result: the data loader, the loss brought to the host at each step, kernels launched one by one.
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import time

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET") else "cpu")
BEGIN = time.perf_counter()
BATCH, FASTEST, SLOWEST, PERIOD, DECAY = 16, 0.05, 0.01, 20, 1e-5


def say(text):
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {text}", flush=True)


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def median_ms(work, times=20):
    """The first call, which may compile, does not count."""
    work()
    taken = []
    for _ in range(times):
        wait()
        begin = time.perf_counter()
        if DEVICE.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            torch.cuda.synchronize()
            taken.append(first.elapsed_time(last))
        else:
            work()
            taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken)


def simplex(rows, columns, random):
    shares = torch.empty(rows, columns, device=DEVICE).exponential_(generator=random)
    return shares / shares.sum(1, keepdim=True)


class Dense:
    """Counts of documents of about `length` words, uint8 on the device, and the factors they come from."""

    def __init__(self, n, m, k, length, seed=42):
        random = torch.Generator(device=DEVICE).manual_seed(seed)
        self.n, self.m, self.k = n, m, k
        self.L, F = simplex(n, k, random), simplex(k, m, random)
        self.Ft = F.T.contiguous()
        self.X = torch.empty(n, m, dtype=torch.uint8, device=DEVICE)
        largest = 0.0
        for rows in torch.arange(n, device=DEVICE).split(max(1, 200_000_000 // m)):
            x = torch.poisson(length * (self.L[rows] @ F), generator=random)
            largest = max(largest, float(x.max()))
            self.X[rows[0] : rows[-1] + 1] = x.clamp_(max=255).to(torch.uint8)
        say(f"{n:,} x {m:,}, k = {k}, {length:,} words per document, largest count {largest:.0f} (255 at most)")


class Sparse:
    """Short documents with few topics each, terms after Zipf's law: a sparse CSR tensor on the device."""

    def __init__(self, n, m, k, length, seed=0):
        random, numbers = torch.Generator(device=DEVICE).manual_seed(seed), np.random.default_rng(seed)
        self.n, self.m, self.k = n, m, k
        base = 1 / (np.arange(m) + 2.7) ** 1.05
        F = np.maximum(numbers.gamma(np.maximum(0.05 * m * base / base.sum(), 1e-3)[None].repeat(k, 0)), 1e-12)
        F /= F.sum(1, keepdims=True)
        self.Ft = torch.from_numpy(F.T.copy()).float().to(DEVICE)
        reached = torch.from_numpy(F.cumsum(1)).to(DEVICE)
        kinds = torch.from_numpy(numbers.dirichlet(np.full(k, 0.1), size=min(n, 50_000))).float().to(DEVICE)
        mixture = kinds[torch.randint(len(kinds), (n,), device=DEVICE, generator=random)].cumsum(1)
        words = torch.randn(n, device=DEVICE, generator=random).mul_(0.8).add_(math.log(length) - 0.32).exp_()
        words = words.clamp_(20, 5000).long()
        keys, values = [], []
        for documents in torch.arange(n, device=DEVICE).split(250_000):
            document = torch.repeat_interleave(documents, words[documents])
            drawn = torch.rand(len(document), device=DEVICE, generator=random)
            topic = torch.zeros_like(document)
            for a in range(k - 1):
                topic += drawn > mixture[document, a]
            term = torch.empty_like(document)
            for a in range(k):
                here = (topic == a).nonzero().squeeze(1)
                drawn = torch.rand(len(here), device=DEVICE, dtype=torch.float64, generator=random) * reached[a, -1]
                term[here] = torch.searchsorted(reached[a].contiguous(), drawn).clamp_(max=m - 1)
            key, value = torch.unique(document * m + term, return_counts=True)
            keys.append(key)
            values.append(value.clamp_(max=255).to(torch.uint8))
        key, count = torch.cat(keys), torch.cat(values)
        document = key // m
        pointer = torch.zeros(n + 1, dtype=torch.int64, device=DEVICE)
        pointer[1:] = torch.bincount(document, minlength=n).cumsum(0)
        index = (key - document * m).to(torch.int32)
        self.X = torch.sparse_csr_tensor(pointer.to(torch.int32), index, count, size=(n, m))
        say(f"{n:,} x {m:,}, k = {k}, {len(key) / n:.0f} nonzeros per document, {len(key) / 1e6:,.1f} M in all")


def random_factors(problem, share, seed=7):
    random = torch.Generator(device=DEVICE).manual_seed(seed)
    L = torch.rand(problem.n, problem.k, device=DEVICE, generator=random) + 0.05
    Ft = torch.rand(problem.m, problem.k, device=DEVICE, generator=random).add_(0.05) * (share[:, None] + 1e-12)
    return L / L.sum(1, keepdim=True), Ft / Ft.sum(0)


def recovery(true, found):
    """Cosine of each true topic with the one assigned to it: mean and least."""
    unit = torch.nn.functional.normalize
    cosines = (unit(true, dim=0).T @ unit(found, dim=0)).cpu().numpy()
    if importlib.util.find_spec("scipy"):
        from scipy.optimize import linear_sum_assignment

        chosen = cosines[linear_sum_assignment(-cosines)]
    else:  # the best pair first
        chosen = []
        for _ in range(len(cosines)):
            a, b = np.unravel_index(cosines.argmax(), cosines.shape)
            chosen.append(cosines[a, b])
            cosines[a], cosines[:, b] = -2, -2
    return float(np.mean(chosen)), float(np.min(chosen))


class Rows(torch.utils.data.Dataset):
    def __init__(self, X):
        self.X = X

    def __len__(self):
        return len(self.X)

    def __getitem__(self, at):
        return self.X[at], torch.tensor(at)


def softmax_factors(n, m, k):
    torch.manual_seed(0)
    L = torch.nn.Embedding(n, k).to(DEVICE)
    torch.nn.init.uniform_(L.weight, 0.0, 0.1)
    F = torch.nn.Parameter(torch.empty(k, m, device=DEVICE).uniform_(0.0, 0.1))
    return L, F


def poisson_loss(x, p):
    return (p - x * torch.log(torch.clamp(p, min=1e-10))).sum()


def their_epoch(X, n, k):
    """Seconds of an epoch of n documents, from one of those in X (float32, on the device)."""
    L, F = softmax_factors(n, X.shape[1], k)
    optimizer = torch.optim.AdamW([L.weight, F], lr=FASTEST, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=PERIOD, eta_min=SLOWEST)
    loader = torch.utils.data.DataLoader(Rows(X), batch_size=BATCH, shuffle=True)
    for turn in range(2):  # the first is to warm up
        wait()
        begin = time.perf_counter()
        for number, (x, rows) in enumerate(loader):
            x, rows = x.to(DEVICE), rows.to(DEVICE)
            optimizer.zero_grad()
            loss = poisson_loss(x, torch.matmul(torch.softmax(L(rows), dim=1), torch.softmax(F, dim=1)))
            loss.backward()
            optimizer.step()
            schedule.step(turn + number / len(loader))
            loss.item()
        wait()
    return (time.perf_counter() - begin) * n / len(X)


class Lean:
    """The rival on counts of any type on the device, its step recorded once and then replayed."""

    def __init__(self, X, k):
        self.X, (n, m) = X, X.shape
        self.L, self.F = softmax_factors(n, m, k)
        on_device = DEVICE.type == "cuda"
        self.batches = n // BATCH
        self.order = torch.zeros(self.batches, BATCH, dtype=torch.int64, device=DEVICE)
        self.rates, self.at = torch.zeros(self.batches, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.optimizer = torch.optim.AdamW(
            [self.L.weight, self.F], lr=torch.tensor(FASTEST, device=DEVICE), weight_decay=DECAY,
            fused=on_device, capturable=on_device,
        )  # fmt: skip
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.step = self._recorded() if on_device else self._step

    def _step(self):
        """The batch `at` of the epoch."""
        rows = self.order.index_select(0, self.at).view(-1)
        self.rate.copy_(self.rates.index_select(0, self.at).view(()))
        self.at.add_(1)
        self.optimizer.zero_grad(set_to_none=True)
        p = torch.softmax(self.L(rows), 1) @ torch.softmax(self.F, 1)
        poisson_loss(self.X.index_select(0, rows).float(), p).backward()
        self.optimizer.step()

    def _recorded(self):
        """A replay does what `_step` does. The steps it takes to get there are undone."""
        factors = (self.L.weight, self.F)
        first = [part.detach().clone() for part in factors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        with torch.no_grad():
            for part, value in zip(factors, first, strict=True):
                part.copy_(value)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        return graph.replay

    def epoch(self, number):
        """Their rate is set after a step: each step has that of the batch before it."""
        self.order.copy_(torch.randperm(len(self.X), device=DEVICE)[: self.order.numel()].view_as(self.order))
        passed = (number * self.batches + torch.arange(self.batches, dtype=torch.float64) - 1).clamp_min(0)
        phase = (passed / self.batches) % PERIOD / PERIOD
        self.rates.copy_(SLOWEST + (FASTEST - SLOWEST) * (1 + torch.cos(math.pi * phase)) / 2)
        self.at.zero_()
        for _ in range(self.batches):
            self.step()

    def factors(self):
        with torch.no_grad():
            return torch.softmax(self.L.weight, 1), torch.softmax(self.F, 1)
