"""Methods of a workload that are told how its run goes and may end it, on all ranks at the same step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import RunFailed
from paceline.launch.process_group import gather_objects
from paceline.workload import Workload


def run_step_callback(workload: Workload, event: Mapping[str, Any], device: torch.device) -> str:
    """Why the run ends after this step; "" where it goes on. Times are not told: each rank has its own."""
    if not workload.has("on_step"):
        return ""
    values = {name: value for name, value in event.items() if name != "step" and not name.endswith("_s")}
    return _agree_on_stop(_parse_stop_reason("on_step", workload.on_step(event["step"], values)), device)


def run_evaluation_callback(workload: Workload, step: int, metrics: Mapping[str, Any], device: torch.device) -> str:
    """Why the run ends after this evaluation; "" where it goes on."""
    if not workload.has("on_evaluate"):
        return ""
    return _agree_on_stop(_parse_stop_reason("on_evaluate", workload.on_evaluate(step, dict(metrics))), device)


def _parse_stop_reason(method: str, said: object) -> str:
    if said is None or isinstance(said, str):
        return said or ""
    raise RunFailed(
        f"workload: {method} returned {said!r}; it must return None to go on, or why the run is to end: "
        'return "the loss is low enough"'
    )


def _agree_on_stop(why: str, device: torch.device) -> str:
    """The same on every rank: one that wants to end it is enough, and the lowest such rank says why."""
    if not dist.is_initialized():
        return why
    wants = torch.tensor(float(bool(why)), device=device)
    dist.all_reduce(wants)
    return next(filter(None, gather_objects(why))) if wants else ""


def dump_callback_state(workload: Workload) -> dict[str, Any]:
    """What the callbacks remember, for a checkpoint."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(workload.callback_state))
    except (TypeError, ValueError) as error:
        raise RunFailed(
            f"workload: callback_state cannot be saved: {error}; it may hold numbers, words, lists and dicts"
        ) from None
    return found
