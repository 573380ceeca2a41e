"""Record a whole step as one CUDA graph: for one rank, on batches that come in a few shapes.

The kernels of a small model run shorter than it takes to start them; a graph is replayed by one call.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from paceline.config.registry import describe_error
from paceline.data.order import Order
from paceline.data.prefetch import Collate, MicroBatch, RankBatch, make_collate
from paceline.execution import NoGraphReason
from paceline.layout import Layout
from paceline.trainer.step.probe import restore_after
from paceline.trainer.step.step import Step, update_weights

AT_ONCE = 16  # batches made at a time, where making one takes about as long as a step
REUSED_TOGETHER = 8  # batches whose memory is used again at the same time
WARM_UP = 3  # runs of the first step before it is recorded; later shapes need one
MAX_GRAPHS = 32
LEAF = tree_flatten(0)[1]
RESIDENT_SHARE = 0.25  # of the device's free memory, that a data set may take


@dataclass(frozen=True)
class PackedBatch:
    """A batch as one row of bytes, and how to unpack it."""

    row: Tensor
    leaves: tuple[tuple[torch.dtype, tuple[int, ...]] | Any, ...]
    tree: Any

    def unpacked(self, row: Tensor) -> Any:
        leaves, begin = [], 0
        for leaf in self.leaves:
            if not (isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], torch.dtype)):
                leaves.append(leaf)
                continue
            dtype, shape = leaf
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            leaves.append(row[begin:end].view(dtype).view(shape))
            begin = -(-end // 8) * 8
        return tree_unflatten(leaves, self.tree)


class PinnedBuffers:
    """Pinned memory that is used again: to pin new memory takes as long as a step of a small model."""

    def __init__(self, together: int = 1) -> None:
        self.together = together
        self.sent: list[Tensor] = []
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.in_flight: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def row(self, size: int) -> Tensor:
        try:
            return self.free[size].pop()
        except IndexError:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_back(self, row: Tensor) -> None:
        """Free a row once the copy to the device is over; the device is asked about several at a time."""
        self.sent.append(row)
        if len(self.sent) < self.together:
            return
        event = torch.cuda.Event()
        event.record()
        self.in_flight.append((event, self.sent))
        self.sent = []
        while self.in_flight and self.in_flight[0][0].query():
            for row in self.in_flight.popleft()[1]:
                self.free[len(row)].append(row)


def pack_batch(batch: Any, buffers: PinnedBuffers) -> PackedBatch:
    leaves, tree = tree_flatten(batch)
    described = tuple((leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    rows = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            rows.append(leaf.detach().reshape(-1).view(torch.uint8).numpy())
            rows.append(np.zeros(-rows[-1].size % 8, np.uint8))
    row = buffers.row(sum(map(len, rows)))
    np.concatenate(rows, out=row.numpy())
    return PackedBatch(row, described, tree)


def pack_ids(ids: np.ndarray, buffers: PinnedBuffers) -> PackedBatch:
    """Do what `pack_batch` does for a tensor of ids, in a fraction of its time."""
    row = buffers.row(ids.nbytes)
    row.numpy().view(np.int64)[:] = ids
    return PackedBatch(row, ((torch.int64, ids.shape),), LEAF)


def load_resident_rows(samples: Any, order: Order, steps: int, device: torch.device) -> Any:
    """Return all samples on the device; None if they are too large, or a short run never sees them all."""
    if not hasattr(samples, "resident") or order.seen(steps) < len(samples):
        return None
    rows = samples.resident()
    size = sum(leaf.nbytes for leaf in tree_leaves(rows) if isinstance(leaf, Tensor))
    if size > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return None
    return tree_map_only(Tensor, lambda leaf: leaf.to(device), rows)


@dataclass
class RecordedGraph:
    """A graph and the tensors outside its own memory that it uses: it does not keep them alive."""

    graph: torch.cuda.CUDAGraph
    row: Tensor
    samples: Tensor
    zero: Tensor
    stats: Tensor
    filled: int = 1


@dataclass
class RecordedStep(Step):
    """The same numbers as those of a `Step`."""

    compiled: Callable[..., Any] | None = field(default=None, kw_only=True)
    """The compiled model: for any shape, or for that of a whole batch."""
    resident: Any = field(default=None, kw_only=True)  # all samples on the device, if batches are ids
    draws: bool = field(default=False, kw_only=True)  # the model draws from the generator of the device
    buffers: PinnedBuffers = field(default_factory=lambda: PinnedBuffers(REUSED_TOGETHER), kw_only=True)

    def __post_init__(self) -> None:
        self.recorded: dict[Any, RecordedGraph] = {}
        self.pool: Any = None
        self.side = torch.cuda.Stream()
        self.any_shape = False
        self.eager = False

    @property
    def times_made(self) -> int:
        return super().times_made + len(self.recorded) + self.eager

    def collate(self, samples: Any, layout: Layout) -> Collate:
        super().collate(samples, layout)  # raises what a step without a graph would
        self.any_shape = hasattr(samples, "fixed_shape_batches")
        make: Collate
        if self.any_shape:
            make = partial(samples.fixed_shape_batches, most=layout.micro_batch)
        elif self.resident is not None:
            return lambda wanted: [pack_ids(ids, self.buffers) for ids, _ in wanted]
        else:
            make = make_collate(samples.batch)
        return lambda wanted: [pack_batch(batch, self.buffers) for batch in make(wanted)]

    def __call__(self, batch: RankBatch, stop: bool) -> Tensor:
        sent: PackedBatch = batch.micro_batches[0].batch
        recorded = None if self.eager else self.recorded.get(sent.leaves)
        if recorded is None and not self.eager and len(self.recorded) < MAX_GRAPHS:
            recorded = self._recorded(sent, whole=batch.samples == self.train.global_batch)
        if recorded is None:
            micro = MicroBatch(self._assembled(sent, sent.row.to(self.device, non_blocking=True)), 1)
            self.buffers.give_back(sent.row)
            return super().__call__(replace(batch, micro_batches=[micro]), stop)
        recorded.row.copy_(sent.row, non_blocking=True)
        self.buffers.give_back(sent.row)
        if recorded.filled != batch.samples:
            recorded.samples.fill_(batch.samples)
            recorded.filled = batch.samples
        if self.draws:
            self.seed(batch, 0)
        recorded.graph.replay()
        stats = recorded.stats.clone()
        if stop:
            stats[3] = 1.0
        return stats

    def _assembled(self, sent: PackedBatch, row: Tensor) -> Any:
        batch = sent.unpacked(row)
        if self.resident is None:
            return batch
        return tree_map_only(Tensor, lambda rows: rows.index_select(0, batch), self.resident)

    def _recorded(self, sent: PackedBatch, whole: bool) -> RecordedGraph | None:
        """Record the step for batches like this; None if that fails, and then no other is recorded."""
        net = self.compiled if self.compiled is not None and (whole or self.any_shape) else self.state.model.unwrapped
        try:
            with restore_after(self):
                self.recorded[sent.leaves] = self._record(sent, net)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self.state.model.local_parameters.clear()
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())  # the old one would wait for the recorder's end
            self.eager = True
            self.notice(f"a step is eager after all: {NoGraphReason.NOT_CAPTURED.value} ({describe_error(error)})")
            return None
        return self.recorded[sent.leaves]

    def _record(self, sent: PackedBatch, net: Any) -> RecordedGraph:
        """Run the step a few times without effect, then once more under the recorder."""
        state, device = self.state, self.device
        row = sent.row.to(device, copy=True)
        samples = torch.ones((), device=device)
        zero = torch.full((), nan, dtype=torch.float64, device=device)
        stats = torch.zeros(4, dtype=torch.float64, device=device)
        kept = [t.clone() for t in state.scaler.state().values()]
        local = state.model.local_parameters

        def step() -> None:
            local.clear()
            found = self.forward_backward(net, MicroBatch(self._assembled(sent, row), 1), samples)
            norm = update_weights(state, self.train, samples, found, local.square(), zero)
            torch.cat([found, norm[None]], out=stats[:3])

        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(1 if self.recorded else WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side, capture_error_mode="thread_local"):
            step()
        self.pool = self.pool or graph.pool()
        for tensor, value in zip(state.scaler.state().values(), kept, strict=True):
            tensor.copy_(value)
        zero.fill_(0.0)
        return RecordedGraph(graph, row, samples, zero, stats)
