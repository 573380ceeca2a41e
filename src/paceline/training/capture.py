"""A whole step as one CUDA graph: for one rank, on batches that come in a few shapes.

A small model's step is hundreds of kernels of microseconds each, and starting them one by one takes longer than they
run. Here a step is recorded once per shape and then replayed with a single call. Its batch travels as one parcel, so
that a step costs the host one copy and one call.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.data.order import Cut, Make, Pass, Serving
from paceline.record.timers import Flights
from paceline.spec import Train
from paceline.training.state import State
from paceline.training.step import run_pass, train_step, update
from paceline.workload import Workload

AT_ONCE = 16
"""Batches made at a time."""
WARM_UP = 3
MOST_GRAPHS = 32
"""Shapes beyond these are run without a graph: a workload with so many is not what graphs are for."""


@dataclass(frozen=True)
class Parcel:
    """A batch as one row of bytes, and how to take it apart."""

    row: Tensor
    pieces: tuple[tuple[torch.dtype, tuple[int, ...]] | Any, ...]
    shape: Any

    def opened(self, row: Tensor) -> Any:
        """The batch, as views of a copy of the row."""
        leaves, begin = [], 0
        for piece in self.pieces:
            if not _is_tensor(piece):
                leaves.append(piece)
                continue
            dtype, shape = piece
            end = begin + dtype.itemsize * _numel(shape)
            leaves.append(row[begin:end].view(dtype).view(shape))
            begin = -(-end // 8) * 8
        return tree_unflatten(leaves, self.shape)


def _is_tensor(piece: Any) -> bool:
    return isinstance(piece, tuple) and len(piece) == 2 and isinstance(piece[0], torch.dtype)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class Shelf:
    """Pinned memory that is used again: to pin some anew takes as long as a whole step of a small model.

    The thread that makes batches takes rows from here, and calls CUDA only for one that is not there yet; the thread
    that sends them puts them back.
    """

    def __init__(self) -> None:
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.flying: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def row(self, size: int) -> Tensor:
        """One that is free, of just this size: batches come in few."""
        rows = self.free[size]
        return rows.pop() if rows else torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def put_back(self, row: Tensor) -> None:
        """Once the copy to the device that was just begun is over."""
        event = torch.cuda.Event()
        event.record()
        self.flying.append((event, row))
        while self.flying and self.flying[0][0].query():
            row = self.flying.popleft()[1]
            self.free[len(row)].append(row)


def parcel(batch: Any, shelf: Shelf) -> Parcel:
    leaves, shape = tree_flatten(batch)
    pieces = tuple((leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    rows = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            rows.append(leaf.numpy().reshape(-1).view(np.uint8))
            rows.append(np.zeros(-rows[-1].size % 8, np.uint8))
    row = shelf.row(sum(map(len, rows)))
    np.concatenate(rows, out=row.numpy())
    return Parcel(row, pieces, shape)


def in_parcels(samples: Any, most: int, shelf: Shelf) -> Make:
    def make(cuts: list[Cut]) -> list[Parcel]:
        return [parcel(batch, shelf) for batch in samples.steady(cuts, most)]

    return make


@dataclass(frozen=True)
class Recorded:
    """A graph and all the tensors outside its own memory that it reads or writes: it does not keep them alive."""

    graph: torch.cuda.CUDAGraph
    row: Tensor
    samples: Tensor
    effective: Tensor
    stats: Tensor


class CapturedStep:
    """Called like `train_step`, and gives the same numbers."""

    def __init__(self, compiled: Callable[..., Any], shelf: Shelf) -> None:
        self.compiled, self.shelf = compiled, shelf
        self.recorded: dict[Any, Recorded] = {}
        self.pool: Any = None
        self.side = torch.cuda.Stream()

    def __call__(
        self,
        serving: Serving,
        workload: Workload,
        net: nn.Module,
        state: State,
        train: Train,
        flights: Flights,
        stop: bool,
    ) -> Tensor:
        sent: Parcel = serving.passes[0].batch
        recorded = self.recorded.get(sent.pieces)
        if recorded is None and len(self.recorded) >= MOST_GRAPHS:
            device = state.scaler.scale.device
            opened = [replace(p, batch=p.batch.opened(p.batch.row.to(device))) for p in serving.passes]
            self.shelf.put_back(sent.row)
            return train_step(replace(serving, passes=opened), workload, net, state, train, flights, stop)
        if recorded is None:
            recorded = self.recorded[sent.pieces] = self._record(sent, workload, state, train)
        recorded.row.copy_(sent.row, non_blocking=True)
        self.shelf.put_back(sent.row)
        recorded.samples.fill_(len(serving.turn.ids))
        recorded.graph.replay()
        stats = recorded.stats.clone()
        if stop:
            stats[3] = 1.0
        return stats

    def _record(self, sent: Parcel, workload: Workload, state: State, train: Train) -> Recorded:
        """Run the step a few times without effect, then once more under the recorder."""
        device = state.scaler.scale.device
        row = sent.row.to(device, copy=True)
        batch = sent.opened(row)
        samples = torch.ones((), device=device)
        effective = torch.zeros((), dtype=torch.bool, device=device)
        stats = torch.zeros(4, dtype=torch.float64, device=device)
        kept = [t.clone() for t in state.scaler.state().values()]

        def step() -> None:
            state.spread.pieces.clear()
            loss_sum, count = run_pass(
                workload, self.compiled, Pass(batch, 1), samples, state.scaler.scale, train.precision
            )
            norm = update(state, train, samples, loss_sum, count, state.spread.pieces.square(), effective)
            stats[:3].copy_(torch.stack([loss_sum, count, norm.double()]))

        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side, capture_error_mode="thread_local"):
            step()
        self.pool = self.pool or graph.pool()
        for tensor, value in zip(state.scaler.state().values(), kept, strict=True):
            tensor.copy_(value)
        effective.fill_(True)
        return Recorded(graph, row, samples, effective, stats)
