"""Workload callbacks: called on every rank, and able to stop the run on all ranks at the same step."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.errors import RunFailed
from paceline.launch.process_group import gather_objects
from paceline.workload import Workload


def run_callback(
    workload: Workload, method: Literal["on_step", "on_evaluate"], step: int, values: Mapping[str, Any], device: Any
) -> str:
    """Call `on_step` or `on_evaluate`, and return why the run should stop, or "" to continue.

    The reason is the same on every rank: that of the lowest rank that wants to stop.
    """
    if not workload.has(method):
        return ""
    reason: object = getattr(workload, method)(step, dict(values))
    if not isinstance(reason, str | None):
        text = f"workload: {method} returned {reason!r}; it must return None, or why the run should stop, as a string"
        raise RunFailed(text, code="invalid-workload", key=method)
    if not dist.is_initialized():
        return reason or ""
    wants = torch.tensor(float(bool(reason)), device=device)
    dist.all_reduce(wants)
    return next(filter(None, gather_objects(reason))) if wants else ""


def dump_callback_state(workload: Workload) -> dict[str, Any]:
    """Return `workload.callback_state` as plain values for a checkpoint."""
    try:
        state: dict[str, Any] = json.loads(json.dumps(workload.callback_state))
    except (TypeError, ValueError) as error:
        reason = f"workload: callback_state cannot be saved: {error}; it may hold numbers, words, lists and dicts"
        raise RunFailed(reason, code="invalid-workload", key="callback_state") from None
    return state
