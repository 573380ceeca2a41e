"""Accelerate as the engine: it wraps the model, and the loop goes on as with any other wrapper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.engines import accelerate_config
from paceline.engines.proof import must_agree
from paceline.engines.surroundings import alone, as_torchrun_says, surrounded_by
from paceline.launch.environment import Place
from paceline.layout import Layout
from paceline.measuring.timers import Flights
from paceline.parallel import ddp
from paceline.parallel.pieces import pieces_of
from paceline.parallel.wrapping import Spread, prepared
from paceline.record.files import write_atomic
from paceline.spec import RunSpec
from paceline.training.optim import optimizer_of
from paceline.training.precision import Scaler
from paceline.training.state import State
from paceline.training.step import train_step
from paceline.workload import Workload


def start(
    spec: RunSpec,
    layout: Layout,
    place: Place,
    workload: Workload,
    device: torch.device,
    folder: Path | None,
    flights: Flights,
) -> tuple[State, Callable[..., Tensor]]:
    """(the state of the run, how a step is done). Our hook sums gradients where Accelerate would take their mean."""
    model = prepared(workload, layout, spec).to(device)
    config = accelerate_config.config(spec, layout, device.type)
    if folder is not None and place.rank == 0:
        write_atomic(folder / accelerate_config.FILE, yaml.safe_dump(config, sort_keys=False))
    place_said = as_torchrun_says(place, device) if layout.ranks > 1 else alone()
    with surrounded_by({**place_said, "ACCELERATE_USE_CPU": str(device.type == "cpu").lower()}):
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        how = DistributedDataParallelKwargs(bucket_cap_mb=spec.parallel.bucket_mb, gradient_as_bucket_view=True)
        accelerator = Accelerator(
            cpu=device.type == "cpu", mixed_precision=config["mixed_precision"], kwargs_handlers=[how]
        )
        net = accelerator.prepare_model(model)
    _prove(accelerator, net, layout, place, device, config)
    if isinstance(net, DistributedDataParallel):
        ddp.sum_gradients(net, flights)
    spread = Spread(net, [model], pieces_of([model], layout.ranks), sum(p.numel() for p in model.parameters()))
    state = State(spread, optimizer_of(spec.train, spread.pieces), Scaler(spec.train.precision, device))
    state.allocate()
    return state, train_step


def _prove(
    accelerator: Any, net: nn.Module, layout: Layout, place: Place, device: torch.device, config: dict[str, Any]
) -> None:
    """Accelerate is as it was asked to be, or the run ends here: some requests it drops without a word."""
    many = layout.ranks > 1
    joined = net.process_group.size() if isinstance(net, DistributedDataParallel) else 1
    has: dict[str, tuple[Any, Any]] = {
        "processes": (accelerator.num_processes, layout.ranks),
        "place": (accelerator.process_index, place.rank),
        "kind": (accelerator.distributed_type.value, config["distributed_type"]),
        "device": (accelerator.device.type, device.type),
        "precision": (accelerator.mixed_precision, config["mixed_precision"]),
        "ranks that sum gradients": (joined, layout.ranks),
        "wrapper": (type(net).__name__, "DistributedDataParallel" if many else type(net).__name__),
    }
    must_agree("Accelerate", has)
