"""One optimiser step on one rank: passes forward and backward, one sum over ranks, one update.

Nothing here waits for the device: what a step found out stays in a small tensor until the loop reads it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.measure.timers import Flights
from paceline.parallel.ddp import quiet
from paceline.spec import Train
from paceline.training.data import Pass, Serving, move, stream
from paceline.training.precision import autocast
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
    effective: bool | Tensor = True,
) -> Tensor:
    """Scale, clip and apply the summed gradients; returns their norm. Not finite anywhere: nothing is applied."""
    params = [p for p in state.model.parameters() if p.grad is not None]
    grads = [p.grad for p in params]
    factor = samples / (count.clamp(min=1) * state.scaler.scale)
    norm = torch.nn.utils.get_total_norm(grads, foreach=True) * factor
    if train.clip:
        factor = factor * (train.clip / (norm + 1e-12)).clamp(max=1.0)
    finite = torch.isfinite(norm) & torch.isfinite(loss_sum) & effective
    optimizer: Any = state.optimizer
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = (1 / factor).float(), (~finite).float()
        optimizer.step()
    elif bool(finite):
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state.scaler.update(finite)
    return norm


def train_step(
    serving: Serving, workload: Workload, net: nn.Module, state: State, train: Train, flights: Flights, stop: bool
) -> Tensor:
    """A whole step; returns (sum of losses, count, gradient norm, stops asked for) over all ranks, on the device.

    A model that draws from torch's own generator finds it seeded by (seed, step, rank, pass): after a resume on the
    same ranks it draws the same.
    """
    samples, scale = len(serving.turn.ids), state.scaler.scale
    rank = dist.get_rank() if dist.is_initialized() else 0
    totals = torch.zeros(3, dtype=torch.float64, device=scale.device)
    totals[2] = float(stop)
    for index, part in enumerate(serving.passes):
        torch.manual_seed(int(stream(train.seed, serving.turn.step, rank, index)) >> 1)
        with quiet(net, last=index == len(serving.passes) - 1):
            totals[:2] += run_pass(workload, net, _moved(part, scale.device), samples, scale, train.precision)
    if dist.is_initialized():
        started = flights.now()
        dist.all_reduce(totals)
        flights.waited(started)
    loss_sum, count, stops = totals
    norm = update(state, train, samples, loss_sum, count)
    return torch.stack([loss_sum, count, norm.double(), stops])


def _moved(part: Pass, device: torch.device) -> Pass:
    return part if device.type == "cpu" else Pass(move(part.batch, device), part.weight)
