"""Record a step of one rank as one CUDA graph: kernels of a small model end before the next starts."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from paceline.config.registry import describe_error
from paceline.data.order import Order
from paceline.data.prefetch import Collate, KeyedBatch, MicroBatch, RankBatch, make_collate, move_batch
from paceline.execution import NoGraphReason
from paceline.layout import Layout
from paceline.nn.transformers_recording import patch_for_recording
from paceline.parallel.compile import Compilation
from paceline.trainer.step.probe import locate_user_line, recording_stream, restore_after
from paceline.trainer.step.step import Step, update_weights

AT_ONCE = 16  # batches made at a time, where making one takes about as long as a step
REUSED_TOGETHER = 8  # batches whose memory is used again at the same time
WARM_UP = 3  # runs of the first step before it is recorded; later shapes need one
MAX_GRAPHS = 32
LARGE_BYTES = 1 << 20  # of a batch, which is then copied beside the step before it
LEAF = tree_flatten(0)[1]
RESIDENT_SHARE = 0.25  # of the device's free memory, that a data set may take


@dataclass(frozen=True)
class PackedBatch:
    """A batch as one row of bytes, and how to unpack it."""

    row: Tensor
    leaves: tuple[tuple[torch.dtype, tuple[int, ...]] | Any, ...]
    tree: Any

    def unpack(self, row: Tensor) -> Any:
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
    """Pinned memory that is used again: to pin takes as long as a small step."""

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
        """Free rows once the copy to the device is over, several at a time."""
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
    """Pack a tensor of ids into pinned memory as `pack_batch` does, in a fraction of its time."""
    row = buffers.row(ids.nbytes)
    row.numpy().view(np.int64)[:] = ids
    return PackedBatch(row, ((torch.int64, ids.shape),), LEAF)


def load_resident_rows(samples: Any, order: Order, steps: int, device: torch.device, precision: str = "") -> Any:
    """Return all samples on the device; None if they are too large, or never all seen."""
    if not hasattr(samples, "resident") or order.seen(steps) < len(samples):
        return None
    rows = samples.resident()
    size = sum(leaf.nbytes for leaf in tree_leaves(rows) if isinstance(leaf, Tensor))
    if size > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return None
    return move_batch(rows, device, precision)


@dataclass
class RecordedGraph:
    """A graph and the tensors outside its own memory that it uses: it does not keep them alive."""

    graph: torch.cuda.CUDAGraph
    row: Tensor
    samples: Tensor
    zero: Tensor
    stats: Tensor
    filled: int = 1
    next_row: Tensor | None = None


@dataclass
class RecordedStep(Step):
    """The same numbers as those of a `Step`."""

    _: KW_ONLY
    compiled: Callable[..., Any] | None = None  # the model: for any shape, or for that of a whole batch
    compilation: Compilation | None = None
    resident: Any = None  # all samples on the device, if batches are ids
    draws: bool = False  # the model draws from the generator of the device
    buffers: PinnedBuffers = field(default_factory=lambda: PinnedBuffers(REUSED_TOGETHER))

    def __post_init__(self) -> None:
        self.recorded: dict[Any, RecordedGraph] = {}
        self.pool: Any = None
        self.side = recording_stream()
        self.copies: torch.cuda.Stream = torch.cuda.Stream()
        self.ahead = self.any_shape = self.eager = False

    @property
    def times_made(self) -> int:
        return super().times_made + self.times_recorded

    @property
    def times_recorded(self) -> int:
        return len(self.recorded) + self.eager

    def collate(self, samples: Any, layout: Layout) -> Collate:
        super().collate(samples, layout)  # raises what a step without a graph would
        self.any_shape = hasattr(samples, "fixed_shape_batches")
        make: Collate
        if self.any_shape:
            make = partial(samples.fixed_shape_batches, most=layout.micro_batch)
        elif self.resident is None:
            make = make_collate(samples.batch)
        elif self.state.model.batch_layers:
            make = make_collate(lambda ids, keys: torch.from_numpy(ids))
        else:
            return lambda wanted: [pack_ids(ids, self.buffers) for ids, _ in wanted]
        make = self.with_keys(make, layout.micro_batch if self.any_shape else 0)
        return lambda wanted: [pack_batch(batch, self.buffers) for batch in make(wanted)]

    def __call__(self, batch: RankBatch, stop: bool) -> Tensor:
        sent: PackedBatch = batch.micro_batches[0].batch
        recorded = None if self.eager else self.recorded.get(sent.leaves)
        if not self.times_recorded and len(sent.row) >= LARGE_BYTES:
            self.ahead, self.buffers.together = True, 1
        if recorded is None and not self.eager and len(self.recorded) < MAX_GRAPHS:
            recorded = self._recorded(sent, whole=batch.samples == self.train.global_batch)
        if recorded is None:
            micro = MicroBatch(self._assemble_batch(sent, sent.row.to(self.device, non_blocking=True)), 1)
            self.buffers.give_back(sent.row)
            return super().__call__(replace(batch, micro_batches=[micro]), stop)
        self._fill(recorded, sent.row)
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

    def _fill(self, recorded: RecordedGraph, row: Tensor) -> None:
        """Copy a batch to where the graph reads it; a large one beside the step before."""
        if not self.ahead:
            recorded.row.copy_(row, non_blocking=True)
            self.buffers.give_back(row)
            return
        if recorded.next_row is None:
            recorded.next_row = torch.empty_like(recorded.row)
        with torch.cuda.stream(self.copies):
            recorded.next_row.copy_(row, non_blocking=True)
            self.buffers.give_back(row)
        torch.cuda.current_stream().wait_stream(self.copies)
        recorded.row.copy_(recorded.next_row)
        self.copies.wait_stream(torch.cuda.current_stream())

    def _assemble_batch(self, sent: PackedBatch, row: Tensor) -> Any:
        batch = move_batch(sent.unpack(row), self.device, self.train.precision)
        if self.resident is None:
            return batch
        ids = batch.batch if isinstance(batch, KeyedBatch) else batch
        rows = tree_map_only(Tensor, lambda column: column.index_select(0, ids), self.resident)
        return KeyedBatch(rows, batch.keys) if isinstance(batch, KeyedBatch) else rows

    def _recorded(self, sent: PackedBatch, whole: bool) -> RecordedGraph | None:
        """Record the step for batches like this; None if that fails, now and later."""
        compiles = whole or self.any_shape
        net = self.compiled if self.compiled is not None and compiles else self.state.model.unwrapped
        if self.compilation is not None:
            self.compilation.paused = not compiles
        try:
            with restore_after(self):
                self.recorded[sent.leaves] = self._record(sent, net)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # kernels of other libraries raise errors of their own
            self.state.model.local_parameters.clear_gradients()
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())  # the old one would wait for the recorder's end
            self.eager = True
            where = "; ".join(filter(None, [locate_user_line(error), describe_error(error)]))
            self.notice(f"a step is eager after all: {NoGraphReason.NOT_CAPTURED.value} ({where})")
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
            local.clear_gradients()
            with patch_for_recording():
                found = self.forward_backward(net, MicroBatch(self._assemble_batch(sent, row), 1), samples)
            state.model.batch_layers.update_statistics(several=False)
            norm = update_weights(state, self.train, samples, found, local.sum_squared_gradients(), zero)
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
