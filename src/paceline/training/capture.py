"""A whole step as one CUDA graph: for one rank, on batches that come in a few shapes.

A small model's step is hundreds of kernels of microseconds each, and starting them one by one takes longer than they
run. Here a step is recorded once per shape and then replayed with a single call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.measure.timers import Flights
from paceline.spec import Train
from paceline.training.data import Pass, Serving
from paceline.training.state import State
from paceline.training.step import run_pass, train_step, update
from paceline.workload import Workload

WARM_UP = 3
MOST_GRAPHS = 32
"""Shapes beyond these are run without a graph: a workload with so many is not what graphs are for."""


@dataclass(frozen=True)
class Recorded:
    """A graph and all the tensors outside its own memory that it reads or writes: it does not keep them alive."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    effective: Tensor
    stats: Tensor


class CapturedStep:
    """Called like `train_step`, and gives the same numbers."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
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
        leaves, shape = tree_flatten(serving.passes[0].batch)
        key = (shape, *((tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf) for leaf in leaves))
        if len(serving.passes) > 1 or (key not in self.recorded and len(self.recorded) >= MOST_GRAPHS):
            return train_step(serving, workload, net, state, train, flights, stop)
        if key not in self.recorded:
            self.recorded[key] = self._record(leaves, shape, workload, state, train)
        recorded = self.recorded[key]
        news = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for mine, new in zip(recorded.inputs, [*news, torch.tensor(float(len(serving.turn.ids)))], strict=False):
            mine.copy_(new, non_blocking=True)
        recorded.graph.replay()
        stats = recorded.stats.clone()
        stats[3] = float(stop)
        return stats

    def _record(self, leaves: list[Any], shape: Any, workload: Workload, state: State, train: Train) -> Recorded:
        """Run the step a few times without effect, then once more under the recorder."""
        device = state.scaler.scale.device
        mine = [leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batch = tree_unflatten(mine, shape)
        samples = torch.ones((), device=device)
        effective = torch.zeros((), dtype=torch.bool, device=device)
        stats = torch.zeros(4, dtype=torch.float64, device=device)
        kept = [t.clone() for t in state.scaler.state().values()]

        def step() -> None:
            state.optimizer.zero_grad(set_to_none=True)
            loss_sum, count = run_pass(
                workload, self.compiled, Pass(batch, 1), samples, state.scaler.scale, train.precision
            )
            norm = update(state, train, samples, loss_sum, count, effective)
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
        inputs = [leaf for leaf in mine if isinstance(leaf, Tensor)]
        return Recorded(graph, [*inputs, samples], effective, stats)
