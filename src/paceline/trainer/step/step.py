"""What is trained, and one step of it on one rank; nothing here waits for the device."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from paceline.config import Train
from paceline.data.order import derive_key
from paceline.data.prefetch import Collate, KeyedBatch, MicroBatch, RankBatch, add_keys, make_collate, move_batch
from paceline.errors import UserError
from paceline.layout import Layout
from paceline.nn.keyed_dropout import STAGE_KEYS
from paceline.parallel.batch_layers import describe_dependence
from paceline.parallel.ddp import reject_unused_parameters, without_sync
from paceline.parallel.parallelize import ParallelModel
from paceline.parallel.parameters import LocalParameters
from paceline.parallel.precision import Scaler, autocast
from paceline.runlog.timers import CollectiveTimer, count_compilations
from paceline.trainer.checkpoint.reader import EMA_ENTRY
from paceline.trainer.checkpoint.staging import flatten_state
from paceline.trainer.optim import optimizers, user_optimizer
from paceline.trainer.optim.optimizers import WeightAverage, set_lr
from paceline.trainer.optim.schedule import scale_lr
from paceline.workload import LogFn, Samples, Workload, ignore_log


@dataclass
class State:
    """What resuming needs; learning rate, samples and random streams are functions of the step."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: Scaler
    step: int = 0
    average: WeightAverage | None = None
    own_optimizer: bool = False

    @classmethod
    def new(
        cls,
        model: ParallelModel,
        train: Train,
        device: torch.device,
        workload: Workload | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> "State":
        """Build the state, with the given optimiser, the workload's own, or that of the run file."""
        local, scaler = model.local_parameters, Scaler(train, device)
        average = WeightAverage(train.ema, local, model.parts) if train.ema else None
        if optimizer is not None:
            return cls(model, optimizer, scaler, average=average, own_optimizer=True)
        if workload is not None and workload.has("optimizer"):
            groups = optimizers.build_update_groups(train, local, model.groups)
            optimizer = user_optimizer.build_user_optimizer(workload, groups, scale_lr(train)[0], local)
            return cls(model, optimizer, scaler, average=average, own_optimizer=True)
        state = cls(model, optimizers.build_optimizer(train, local, model.groups), scaler, average=average)
        state.allocate()
        return state

    def before_step(self, lr: float) -> None:
        set_lr(self.optimizer, lr)
        if self.average is not None:
            self.average.before(self.step)

    def for_evaluation(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.in_use()

    def tensors(self) -> dict[str, Any]:
        """Return everything to be saved, by name; loading writes into these tensors."""
        model = {name: value for part in self.model.parts for name, value in part.state_dict().items()}
        optim = {
            f"{local.name}.{key}": local.whole(value)
            for local in self.model.local_parameters
            for key, value in optimizers.list_state_tensors(self.optimizer, local.data)
        }
        found: dict[str, Any] = {"model": model, "optim": optim, "scaler": self.scaler.state()}
        if kept := self.model.reduction.tensors():
            found[self.model.reduction.entry] = kept
        if self.average is not None:
            found[EMA_ENTRY] = self.average.tensors()
        if self.own_optimizer:
            found[user_optimizer.ENTRY] = {"begun": torch.tensor(float(bool(optim)))}
        return found

    def replicas(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what several ranks may hold of `tensors()`: weights, averages and optimiser state; not buffers."""
        others = ("optim", EMA_ENTRY, self.model.reduction.entry)
        names = [name for part in self.model.parts for name, _ in part.named_parameters()]
        weights = {name: saved["model"][name] for name in names}
        return weights | flatten_state({key: saved[key] for key in others if key in saved})

    def restore(self, read: Callable[[dict[str, Any]], None]) -> None:
        """Restore what `read` puts into tensors of these names and shapes."""
        if self.own_optimizer:
            begun = torch.zeros(())
            read({user_optimizer.ENTRY: {"begun": begun}})
            if begun:
                user_optimizer.allocate_user_state(self.optimizer)
        tensors = self.tensors()
        read(tensors)
        for local in self.model.local_parameters:
            optimizers.restore_numbers(self.optimizer, local.data, local.name, tensors["optim"])

    def average_over_ranks(self) -> None:
        self.model.reduction.average_models(self.step, now=True)
        self.model.reduction.average_state(self._optimizer_tensors())

    def buffers(self) -> Iterator[Tensor]:
        for part in self.model.parts:
            yield from part.buffers()

    def allocate(self) -> None:
        """Create all state, at zero, so that a checkpoint holds the same tensors at any step."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        set_lr(self.optimizer, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for value in self._optimizer_tensors():
            value.zero_()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for values in self.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))


def update_weights(
    state: State, train: Train, samples: int | Tensor, found: Tensor, square: Tensor, zero: float | Tensor = 0.0
) -> Tensor:
    """Scale, clip and apply the summed gradients, unless they or `zero` are not finite; return their norm.

    `found` is (sum of losses, count), `square` the squared norm over all ranks.
    """
    loss_sum, count = found
    local, optimizer = state.model.local_parameters, cast(Any, state.optimizer)
    where = local[0].data.device  # the host's where the state is kept there
    scale = get_divisor(count) * (state.scaler.scale / samples)
    as_it_is = square.sqrt()
    norm = as_it_is / scale
    if train.clip:
        scale = torch.maximum(scale, as_it_is / train.clip)
    finite = (norm + loss_sum) * zero == 0
    scale, applied = scale.to(where), finite.to(where)
    if state.own_optimizer:
        local.complete_gradients()
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        if train.clip_value:
            scale = _scale_and_cut(local, scale, train.clip_value)
        optimizer.grad_scale = scale.float()
        optimizer.found_inf = torch.logical_not(applied, out=torch.empty_like(optimizer.grad_scale))
        optimizer.step()
    elif bool(applied):
        _scale_and_cut(local, scale, train.clip_value)
        optimizer.step()
    if state.average is not None:
        state.average.add(applied)
    local.after_update()
    local.clear_gradients()
    state.scaler.update(finite)
    return norm


def _scale_and_cut(local: LocalParameters, scale: Tensor, most: float) -> Tensor:
    """Divide gradients and clip each number to ± most; return what is left to divide by."""
    grads = [part.data.grad for part in local if part.data.grad is not None]
    torch._foreach_mul_(grads, (1 / scale).to(torch.promote_types(grads[0].dtype, torch.float32)))
    if most:
        torch._foreach_clamp_min_(grads, -most)
        torch._foreach_clamp_max_(grads, most)
    return torch.ones_like(scale)


def get_divisor(count: Tensor) -> Tensor:
    """Return what a sum of losses is divided by: their number or weight, and 1 if nothing counts."""
    return count + (count == 0)


@dataclass
class Step:
    """A step, operation by operation; subclasses do the same in other ways."""

    workload: Workload
    state: State
    train: Train
    timer: CollectiveTimer
    padded: bool = False  # whether all micro-batches must have the same shape
    at_once: int = 1  # steps whose batches are made together
    notice: LogFn = ignore_log
    copies: torch.cuda.Stream | None = None  # of batches to the device
    local_sums: Tensor | None = None  # (sum of losses, count) of this rank in the last step
    observed: bool = field(default=False, init=False)  # whether a pass was, for what depends on the layout

    @property
    def net(self) -> Any:
        return self.state.model.net

    @property
    def times_made(self) -> int:
        """Return how often a part was compiled so far, or the whole was recorded."""
        return count_compilations()

    @property
    def device(self) -> torch.device:
        return self.state.scaler.scale.device

    def collate(self, samples: Samples, layout: Layout) -> Collate:
        pin = self.device.type == "cuda"
        if not self.padded:
            return self.with_keys(make_collate(self._divide(samples.batch), pin))
        if not hasattr(samples, "padded"):
            key = "parallel.pipeline" if layout.pipeline > 1 else "compile_layers"
            reason = f"{key}: {type(samples).__name__} has no method padded(ids, keys, rows) for passes of one shape"
            raise UserError(reason, code="not-supported", key=key)
        rows = math.ceil(layout.global_batch / (layout.data * layout.passes(layout.global_batch)))
        padded = self._divide(lambda ids, keys: samples.padded(ids, keys, rows))
        return self.with_keys(make_collate(padded, pin), rows)

    def with_keys(self, collate: Collate, rows: int = 0) -> Collate:
        """Return `collate`, wrapped to add the keys of rows if the model has layers that use them."""
        return add_keys(collate, rows) if self.state.model.batch_layers else collate

    def _divide(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return `make`, wrapped to keep this rank's part of each batch if ranks divide sequences."""
        context = self.state.model.context
        return make if context is None else lambda *given: self.workload.divide_context(make(*given), context)

    def __call__(self, batch: RankBatch, stop: bool) -> Tensor:
        """Train on a batch; return (sum of losses, count, gradient norm, stops asked for) over all ranks."""
        samples, last = batch.samples, len(batch.micro_batches) - 1
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        for index, micro in enumerate(batch.micro_batches):
            self.seed(batch, index)
            with without_sync(self.net, last=index == last):
                found += self.forward_backward(self.net, self.move_to_device(micro), samples)
        return self.finish(found, samples, stop)

    def seed(self, batch: RankBatch, index: int) -> None:
        """Seed the generators of a pass, a hundred times as fast as `torch.manual_seed`."""
        number = int(derive_key(self.train.seed, batch.global_batch.step, batch.rank, index)) >> 1
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(number)

    def move_to_device(self, micro: MicroBatch) -> MicroBatch:
        if self.device.type == "cpu":
            return micro if self.train.precision != "fp64" else self._move(micro)
        self.copies = self.copies or torch.cuda.Stream()
        with torch.cuda.stream(self.copies):  # beside the pass before it, which is still at work
            moved = self._move(micro)
        now = torch.cuda.current_stream()
        now.wait_stream(self.copies)
        for leaf in tree_leaves(moved.batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(now)
        return moved

    def _move(self, micro: MicroBatch) -> MicroBatch:
        return MicroBatch(move_batch(micro.batch, self.device, self.train.precision), micro.weight)

    @contextmanager
    def running_pass(self, micro: MicroBatch) -> Iterator[Any]:
        """Yield the batch, for a pass in which layers draw from the keys of its samples."""
        batch, keys = micro.batch if isinstance(micro.batch, KeyedBatch) else (micro.batch, None)
        observing = not self.observed and self.notice is not ignore_log
        drawn = self._count_draws() if observing else None
        with self.state.model.batch_layers.passes.running(keys, counted=micro.weight > 0):
            yield batch
        if observing:
            self.observed = True
            if found := describe_dependence(draws=self._count_draws() != drawn):
                self.notice(found)

    def _count_draws(self) -> tuple[Any, ...]:
        """Return what changes when something draws from torch's generators."""
        of_device = torch.cuda.default_generators[self.device.index or 0] if self.device.type == "cuda" else None
        return torch.default_generator.get_state().numpy().tobytes(), of_device and of_device.get_offset()

    def forward_backward(self, net: Any, micro: MicroBatch, samples: int | Tensor) -> Tensor:
        """Add to the gradients, of the loss per sample of the global batch; return (sum of losses, count)."""
        with self.running_pass(micro) as batch:
            with autocast(self.train.precision, self.device):
                total, count = self.workload.loss(net, batch)
            return self.backward(total, count, micro.weight, samples)

    def backward(self, total: Tensor, count: Tensor | float, weight: int, samples: int | Tensor) -> Tensor:
        self.state.model.batch_layers.passes.end_forward()
        scale = self.state.scaler.scale
        factor = (scale if weight == 1 else scale * weight) / samples
        total.backward(factor.to(total.dtype).expand_as(total))
        return stack_loss_and_count(total, count, weight)

    def finish(self, found: Tensor, samples: int, stop: bool) -> Tensor:
        """All-reduce the sums and update the weights; return (sum of losses, count, gradient norm, stops asked for)."""
        model, self.local_sums = self.state.model, found
        model.batch_layers.update_statistics(not model.reduction.own_models, self.timer)
        reject_unused_parameters(model.net, model.local_parameters)
        if model.reduction.own_models:
            return self._finish_own_model(found, samples, stop)
        model.local_parameters.attach_gradients()
        square = model.local_parameters.sum_squared_gradients().to(found.device)
        totals = torch.cat([found / model.same_samples, found.new_full((1,), float(stop)), square[None]])
        if dist.is_initialized():
            with self.timer.blocking():
                dist.all_reduce(totals)
        norm = update_weights(self.state, self.train, samples, totals[:2], totals[3])
        return torch.stack([*totals[:2], norm.double(), totals[2]])

    def _finish_own_model(self, found: Tensor, samples: int, stop: bool) -> Tensor:
        """Finish a step of models that differ by rank: all-reduce its totals and update, unless one is not finite."""
        square = self.state.model.local_parameters.sum_squared_gradients()
        factor = samples / (get_divisor(found[1]) * self.state.scaler.scale)
        totals = torch.cat([found, found.new_full((1,), float(stop)), (square * factor.square())[None]])
        with self.timer.blocking():
            dist.all_reduce(totals)
        update_weights(self.state, self.train, samples, found, square, zero=totals.sum() * 0)
        loss_of_all, count_of_all, stops, squares = totals
        return torch.stack([loss_of_all, count_of_all, (squares / dist.get_world_size()).sqrt(), stops])


class PipelineStep(Step):
    """A step of a model in stages: all micro-batches go through them in one schedule."""

    def __call__(self, batch: RankBatch, stop: bool) -> Tensor:
        samples, scale = batch.samples, self.state.scaler.scale
        micro_batches = [self.move_to_device(micro) for micro in batch.micro_batches]
        keys = [micro.batch.keys for micro in micro_batches if isinstance(micro.batch, KeyedBatch)]
        batches = [m.batch.batch if isinstance(m.batch, KeyedBatch) else m.batch for m in micro_batches]
        inputs = [self.workload.inputs(batch) for batch in batches]
        first = torch.cat([one for one, _ in inputs])
        every = {name: torch.cat([more[name] for _, more in inputs]) for name in inputs[0][1]}
        every |= {STAGE_KEYS: torch.cat(keys)} if keys else {}
        by_index: dict[int, Tensor] = {}  # torch calls the loss of 0 twice

        def loss(output: Tensor, index: int) -> Tensor:
            micro = micro_batches[index]
            total, count = self.workload.loss(cast(Any, lambda *_, **__: output), batches[index])
            by_index[index] = stack_loss_and_count(total, count, micro.weight)
            return total * (scale * (micro.weight / samples))

        self.seed(batch, self.net.rank)
        passes = self.state.model.batch_layers.passes
        with passes.running(keys[0] if keys else None), autocast(self.train.precision, self.device):
            self.net.step(first, every, loss, len(micro_batches))
        found = sum(by_index.values(), torch.zeros(2, dtype=torch.float64, device=self.device))
        return self.finish(found, samples, stop)


class InferredPipelineStep(Step):
    """A step of a model in stages that were found: each rank calls the loss, up to the end of its stage."""

    def __call__(self, batch: RankBatch, stop: bool) -> Tensor:
        samples, count = batch.samples, len(batch.micro_batches)
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        ahead, waiting = iter(enumerate(batch.micro_batches)), deque[tuple[MicroBatch, Any]]()
        for forward in self.net.list_orders(count):
            if forward:
                index, micro = next(ahead)
                self.seed(batch, index)
                micro = self.move_to_device(micro)
                with self.running_pass(micro) as given, autocast(self.train.precision, self.device):
                    result = self.net.run(given, partial(self.workload.loss, self.net, given))
                waiting.append((micro, result))
                continue
            micro, (received, outputs, loss) = waiting.popleft()
            start = None if loss is None else partial(self.backward, loss[0], loss[1], micro.weight, samples)
            with self.running_pass(micro):  # layers may be computed again
                found += self.net.backward(received, outputs, start)
        self.net.finish()
        return self.finish(found, samples, stop)


def stack_loss_and_count(total: Tensor, count: Tensor | float, weight: int) -> Tensor:
    if isinstance(count, Tensor):
        both = torch.stack([total.detach().double(), count.to(total.device, torch.float64)])
    else:
        both = torch.full((2,), float(count), dtype=torch.float64, device=total.device)
        both[0] = total.detach()
    return both if weight == 1 else weight * both
