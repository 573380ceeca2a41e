"""Workload callbacks: called on every rank, and able to stop the run on all ranks at the same step."""

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
    """Call `workload.on_step` and return why the run should stop, or "" to continue.

    Timings are left out: they differ between ranks, so a decision based on them would too.
    """
    if not workload.has("on_step"):
        return ""
    metrics = {name: value for name, value in event.items() if name != "step" and not name.endswith("_s")}
    return _agree_on_stop(_parse_stop_reason("on_step", workload.on_step(event["step"], metrics)), device)


def run_evaluation_callback(workload: Workload, step: int, metrics: Mapping[str, Any], device: torch.device) -> str:
    """Call `workload.on_evaluate` and return why the run should stop, or "" to continue."""
    if not workload.has("on_evaluate"):
        return ""
    return _agree_on_stop(_parse_stop_reason("on_evaluate", workload.on_evaluate(step, dict(metrics))), device)


def _parse_stop_reason(method: str, returned: object) -> str:
    if returned is None or isinstance(returned, str):
        return returned or ""
    reason = f"workload: {method} returned {returned!r}; it must return None, or why the run should stop, as a string"
    raise RunFailed(reason, code="invalid-workload", key=method)


def _agree_on_stop(reason: str, device: torch.device) -> str:
    """Return the same reason on every rank: that of the lowest rank that wants to stop."""
    if not dist.is_initialized():
        return reason
    wants = torch.tensor(float(bool(reason)), device=device)
    dist.all_reduce(wants)
    return next(filter(None, gather_objects(reason))) if wants else ""


def dump_callback_state(workload: Workload) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(workload.callback_state))
    except (TypeError, ValueError) as error:
        reason = f"workload: callback_state cannot be saved: {error}; it may hold numbers, words, lists and dicts"
        raise RunFailed(reason, code="invalid-workload", key="callback_state") from None
    return found
