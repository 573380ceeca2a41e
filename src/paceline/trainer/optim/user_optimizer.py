"""Use an optimiser of the user or of a script under every layout and in every checkpoint."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from paceline.config.registry import describe_error
from paceline.errors import UserError, invalid_workload, join_names, reject_value
from paceline.parallel.parameters import LocalParameters
from paceline.workload import Workload

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
PROBE = (8, 3)  # shape of the matrix that tells whether rows are updated as the whole is
ENTRY = "own_optimizer"
OPTIMIZER = "optimizer"  # the method of a workload


def build_user_optimizer(
    workload: Workload, groups: list[dict[str, Any]], peak: float, local: LocalParameters
) -> torch.optim.Optimizer:
    """Return what the workload makes of the groups, each with its peak learning rate."""
    given = [{"params": g["params"], "lr": peak * g["lr_factor"], "weight_decay": g["weight_decay"]} for g in groups]
    _reject_row_dependent(partial(_call_workload, workload), given, local, workload.spec.parallel.strategy)
    optimizer = _call_workload(workload, given)
    if left_out := _prepare_groups(optimizer, peak, local):
        advice = 'give it all of groups, and freeze the rest with train.groups: {"NAME*": {frozen: true}}'
        raise invalid_workload(OPTIMIZER, f"optimizer(groups) leaves out {join_names(left_out, 3)}; {advice}")
    return optimizer


def take_over_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], peak: float, local: LocalParameters, strategy: str
) -> None:
    """Replace the parameters of a script's optimiser by this rank's parts; `names` are by the id of a parameter."""
    mine = {part.name: part.data for part in local}
    groups = []
    for group in optimizer.param_groups:
        own = [names.get(id(p)) for p in group["params"]]
        if None in own:
            raise _conflict_error(optimizer, "has a parameter that the model does not have")
        groups.append({**group, "params": [mine[name] for name in own if name in mine]})
    _reject_row_dependent(partial(_clone_optimizer, optimizer), [g for g in groups if g["params"]], local, strategy)
    for group, taken in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = taken["params"]
    if left_out := _prepare_groups(optimizer, peak, local):
        raise _conflict_error(optimizer, f"leaves out {join_names(left_out, 3)}; freeze what is not trained")


def _conflict_error(optimizer: torch.optim.Optimizer, reason: str) -> UserError:
    key = "run.prepare"
    return UserError(f"{key}: the {type(optimizer).__name__} {reason}", code="conflict", key=key)


def _clone_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [dict(group) for group in groups]
    other.state = defaultdict(dict)
    return other


def _reject_row_dependent(make: Make, groups: list[dict[str, Any]], local: LocalParameters, strategy: str) -> None:
    if local.divided and not _updates_rows_alike(make, groups):
        kind = type(make(_probes(groups, [slice(None)]))).__name__
        reason = f"{kind} does not update the rows of a matrix as it updates the whole; use parallel.strategy=ddp"
        raise reject_value("parallel.strategy", strategy, reason)


def _prepare_groups(optimizer: torch.optim.Optimizer, peak: float, local: LocalParameters) -> list[str]:
    """Set the factor of each group; return names of parameters left out."""
    names = {id(part.data): part.name for part in local}
    for group in optimizer.param_groups:
        group["lr_factor"] = float(group["lr"]) / peak
        for p in group["params"]:
            names.pop(id(p), None)
    if names:
        return list(names.values())
    first = {
        p: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        for p, state in optimizer.state.items()
    }
    allocate_user_state(optimizer)
    optimizer.state.clear()
    optimizer.state.update(first)
    return []


def _call_workload(workload: Workload, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    optimizer: object = workload.optimizer([dict(group) for group in groups])
    if not isinstance(optimizer, torch.optim.Optimizer):
        returned = f"optimizer(groups) returned {type(optimizer).__name__}, not an optimiser"
        raise invalid_workload(OPTIMIZER, f"{returned}; write  return torch.optim.RMSprop(groups)")
    return optimizer


@torch.no_grad()
def allocate_user_state(optimizer: torch.optim.Optimizer) -> None:
    """Create all state by a step without effect; raise UserError for what cannot be saved."""
    kind = type(optimizer).__name__
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before, options = [p.clone() for p in params], [_read_options(group) for group in optimizer.param_groups]
    for p in params:
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    except (TypeError, RuntimeError, ValueError) as error:
        raise invalid_workload(OPTIMIZER, f"{kind} cannot make a step: {describe_error(error)}") from error
    optimizer.zero_grad(set_to_none=True)
    for p, value in zip(params, before, strict=True):
        p.copy_(value)
    for group, known in zip(optimizer.param_groups, options, strict=True):
        if changed := [key for key, value in _read_options(group).items() if known.get(key) != value]:
            kept = f"{kind} keeps {changed[0]!r} in its groups, where a checkpoint does not see it"
            raise invalid_workload(OPTIMIZER, kept)
    for key, value in (item for state in optimizer.state.values() for item in state.items()):
        if not isinstance(value, Tensor | Number | None):
            kept = f"{kind} keeps {key!r} as {type(value).__name__}; a checkpoint holds tensors and numbers"
            raise invalid_workload(OPTIMIZER, kept)


def _read_options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, int | float | str) and key != "lr"}


def _probes(groups: list[dict[str, Any]], cuts: list[slice]) -> list[dict[str, Any]]:
    """Return the groups with small tensors in place of the parameters, cut into rows or whole."""
    made = []
    for group in groups:
        shape = PROBE if group["params"][0].ndim > 1 else PROBE[:1]
        whole = torch.linspace(-1, 1, math.prod(shape)).view(shape)
        made.append({**group, "params": [whole[cut].clone().requires_grad_() for cut in cuts]})
    return made


def _updates_rows_alike(make: Make, groups: list[dict[str, Any]]) -> bool:
    results = []
    for cuts in ([slice(None)], [slice(0, 3), slice(3, None)]):
        probes = _probes(groups, cuts)
        optimizer = make(probes)
        for step in range(3):
            for group in probes:
                for p, cut in zip(group["params"], cuts, strict=True):
                    shape = PROBE[: p.ndim]
                    p.grad = torch.sin(torch.arange(math.prod(shape)) + 1.0 + step).view(shape)[cut].clone()
            optimizer.step()
        results.append([torch.cat([p.detach() for p in group["params"]]) for group in probes])
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*results, strict=True))
