"""One optimiser step on one rank: passes forward and backward, one sum over ranks, one update.

Nothing here waits for the device: what a step found out stays in a small tensor until the loop reads it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.order import Pass, Serving, move, stream
from paceline.parallel.ddp import quiet
from paceline.parallel.precision import autocast
from paceline.record.timers import Flights
from paceline.spec import Train
from paceline.training.state import State
from paceline.workload import Workload


def run_pass(workload: Workload, net: Any, part: Pass, samples: int | Tensor, scale: Tensor, precision: str) -> Tensor:
    """Forward and backward of one pass; adds to the gradients, returns (sum of losses, count).

    The sum is divided by the samples of the global batch so that gradients keep a normal size; `update` puts in what
    that leaves out where the loss counts something else (tokens, pixels).
    """
    with autocast(precision, scale.device):
        total, count = workload.loss(net, part.batch)
    (total * (scale * (part.weight / samples))).backward()
    return part.weight * torch.stack([total.detach().double(), torch.as_tensor(count, device=total.device).double()])


def update(
    state: State,
    train: Train,
    samples: int | Tensor,
    loss_sum: Tensor,
    count: Tensor,
    square: Tensor,
    effective: bool | Tensor = True,
) -> Tensor:
    """Scale, clip and apply the summed gradients; returns their norm. Not finite anywhere: nothing is applied.

    `square` is the squared norm of the gradients as they are, over all ranks.
    """
    pieces, optimizer = state.spread.pieces, cast(Any, state.optimizer)
    factor = samples / (count.clamp(min=1) * state.scaler.scale)
    norm = square.sqrt() * factor
    if train.clip:
        factor = factor * (train.clip / (norm + 1e-12)).clamp(max=1.0)
    finite = torch.isfinite(norm) & torch.isfinite(loss_sum) & effective
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        where = pieces[0].data.device  # the host's where the state is kept there
        optimizer.grad_scale, optimizer.found_inf = (1 / factor).float().to(where), (~finite).float().to(where)
        optimizer.step()
    elif bool(finite):
        grads = [piece.data.grad for piece in pieces if piece.data.grad is not None]
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        optimizer.step()
    pieces.after_update()
    pieces.clear()
    state.scaler.update(finite)
    return norm


def train_step(
    serving: Serving, workload: Workload, net: nn.Module, state: State, train: Train, flights: Flights, stop: bool
) -> Tensor:
    """A whole step; returns (sum of losses, count, gradient norm, stops asked for) over all ranks, on the device.

    A model that draws from torch's own generator finds it seeded by (seed, step, data-parallel rank, pass): after a
    resume on the same ranks it draws the same.
    """
    samples, scale = len(serving.turn.ids), state.scaler.scale
    found = torch.zeros(2, dtype=torch.float64, device=scale.device)
    for index, part in enumerate(serving.passes):
        torch.manual_seed(int(stream(train.seed, serving.turn.step, serving.rank, index)) >> 1)
        with quiet(net, last=index == len(serving.passes) - 1):
            found += run_pass(workload, net, moved(part, scale.device), samples, scale, train.precision)
    return finish_step(found, samples, state, train, flights, stop)


def pipeline_step(
    serving: Serving, workload: Workload, net: Any, state: State, train: Train, flights: Flights, stop: bool
) -> Tensor:
    """The same where the model is spread over stages: all passes go through them in one schedule."""
    samples, scale = len(serving.turn.ids), state.scaler.scale
    passes = [moved(part, scale.device) for part in serving.passes]
    inputs = [workload.inputs(part.batch) for part in passes]
    first = torch.cat([one for one, _ in inputs])
    every = {name: torch.cat([more[name] for _, more in inputs]) for name in inputs[0][1]}
    by_pass: dict[int, Tensor] = {}  # not a sum: torch also calls the loss of pass 0 to learn its shape

    def loss(output: Tensor, index: int) -> Tensor:
        total, count = workload.loss(cast(Any, lambda *_, **__: output), passes[index].batch)
        counted = torch.stack([total.detach().double(), torch.as_tensor(count, device=total.device).double()])
        by_pass[index] = passes[index].weight * counted
        return total * (scale * (passes[index].weight / samples))

    torch.manual_seed(int(stream(train.seed, serving.turn.step, serving.rank, net.rank)) >> 1)
    with autocast(train.precision, scale.device):
        net.step(first, every, loss, len(passes))
    found = sum(by_pass.values(), torch.zeros(2, dtype=torch.float64, device=scale.device))
    return finish_step(found, samples, state, train, flights, stop)


def finish_step(found: Tensor, samples: int, state: State, train: Train, flights: Flights, stop: bool) -> Tensor:
    """What follows the passes: one sum over ranks of what they found (sum of losses, count), then the update."""
    if state.spread.saving.alone:
        return _finish_alone(found, samples, state, train, flights, stop)
    spread = state.spread
    spread.pieces.gradients()
    square = spread.pieces.square().to(found.device)
    totals = torch.cat([found / spread.same_samples, found.new_full((1,), float(stop)), square[None]])
    if dist.is_initialized():
        started = flights.now()
        dist.all_reduce(totals)
        flights.waited(started)
    loss_sum, count, stops, square = totals
    norm = update(state, train, samples, loss_sum, count, square)
    return torch.stack([loss_sum, count, norm.double(), stops])


def _finish_alone(found: Tensor, samples: int, state: State, train: Train, flights: Flights, stop: bool) -> Tensor:
    """The same where each rank updates a model of its own, by the mean over its own samples.

    The norm that is reported is the root of the mean over ranks of their squared norms. A step that is not finite on
    one rank is applied by none, so that their loss scales stay the same. A rank without a sample has a gradient of 0.
    """
    loss_sum, count = found
    square = state.spread.pieces.square()
    factor = samples / (count.clamp(min=1) * state.scaler.scale)
    totals = torch.cat([found, found.new_full((1,), float(stop)), (square * factor.square())[None]])
    started = flights.now()
    dist.all_reduce(totals)
    flights.waited(started)
    update(state, train, samples, loss_sum, count, square, effective=torch.isfinite(totals).all())
    loss_of_all, count_of_all, stops, squares = totals
    return torch.stack([loss_of_all, count_of_all, (squares / dist.get_world_size()).sqrt(), stops])


def moved(part: Pass, device: torch.device) -> Pass:
    return part if device.type == "cpu" else Pass(move(part.batch, device), part.weight)
