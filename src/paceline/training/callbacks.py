"""Methods of a workload that are told how its run goes and may end it, on all ranks at the same step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import RunFailed
from paceline.launch.group import gather_objects
from paceline.workload import Workload


def told_of_step(workload: Workload, event: Mapping[str, Any], device: torch.device) -> str:
    """Why the run ends after this step; "" where it goes on. Times are not told: each rank has its own."""
    if not workload.has("on_step"):
        return ""
    values = {name: value for name, value in event.items() if name != "step" and not name.endswith("_s")}
    return _agreed(_words("on_step", workload.on_step(event["step"], values)), device)


def told_of_evaluation(workload: Workload, step: int, metrics: Mapping[str, Any], device: torch.device) -> str:
    """Why the run ends after this evaluation; "" where it goes on."""
    if not workload.has("on_evaluate"):
        return ""
    return _agreed(_words("on_evaluate", workload.on_evaluate(step, dict(metrics))), device)


def _words(method: str, said: object) -> str:
    if said is None or isinstance(said, str):
        return said or ""
    raise RunFailed(
        f"workload: {method} returned {said!r}; it must return None to go on, or why the run is to end: "
        'return "the loss is low enough"'
    )


def _agreed(why: str, device: torch.device) -> str:
    """The same on every rank: one that wants to end it is enough, and the lowest such rank says why."""
    if not dist.is_initialized():
        return why
    wants = torch.tensor(float(bool(why)), device=device)
    dist.all_reduce(wants)
    return next(filter(None, gather_objects(why))) if wants else ""


def saved_state(workload: Workload) -> dict[str, Any]:
    """What the callbacks remember, for a checkpoint."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(workload.callback_state))
    except (TypeError, ValueError) as error:
        raise RunFailed(
            f"workload: callback_state cannot be saved: {error}; it may hold numbers, words, lists and dicts"
        ) from None
    return found
