"""Elastic state: committed every few steps, and read back when ranks are restarted."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.errors import UserError
from paceline.horovod import functions, world
from paceline.horovod.async_ops import start_reduce
from paceline.horovod.elastic import commits
from paceline.horovod.elastic.sampler import ElasticSampler
from paceline.horovod.reduction import ReduceRule, Sum
from paceline.io.terminal import warn
from paceline.launch.process_group import broadcast_from_main

T = TypeVar("T")
WRITE_EVERY_S = 2.0
WRITING_SHARE = 0.1  # of the time, at most


class ElasticState:
    """Named values as attributes, copied in memory by `save` and on disk by `commit`."""

    def __init__(self, **values: Any) -> None:
        self._values = values
        self._saved: dict[str, Any] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._file: Path | None = None  # set by `run`
        self._next_write_s = 0.0
        self.save()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._values[name] = value

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call after a restart, for example to scale the learning rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        for call in self._callbacks:
            call()

    def check_host_updates(self) -> None:
        """Do nothing: hosts change between restarts only."""

    def commit(self) -> None:
        """Save the state; the main rank writes it at most every two seconds and a tenth of the time."""
        self.save()
        if self._file is not None and world.rank() == 0 and time.monotonic() >= self._next_write_s:
            began_s = time.monotonic()
            commits.write_commit(self._file, _scale_sampler_counts(self._saved))
            ended_s = time.monotonic()
            self._next_write_s = ended_s + max(WRITE_EVERY_S, (ended_s - began_s) / WRITING_SHARE)

    def save(self) -> None:
        self._saved = {name: _copy_value(value) for name, value in self._values.items()}

    def restore(self) -> None:
        """Restore what was saved last."""
        for name, saved in self._saved.items():
            now: Any = self._values.get(name)
            if _stateful(now):
                now.load_state_dict(copy.deepcopy(saved))
            elif isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
                self._values[name] = saved.clone().to(now.device)
            else:
                self._values[name] = copy.deepcopy(saved)

    def sync(self) -> None:
        """Broadcast the main rank's values, and sum what samplers have processed."""
        plain = {name: value for name, value in self._values.items() if not _stateful(value)}
        self._values.update(functions.broadcast_object(plain))
        for value in self._values.values():
            if isinstance(value, torch.nn.Module):
                functions.broadcast_parameters(value.state_dict())
            elif isinstance(value, torch.optim.Optimizer):
                functions.broadcast_optimizer_state(value)
            elif isinstance(value, ElasticSampler):
                main = functions.broadcast_object(value.state_dict())
                since = start_reduce(torch.tensor([value.since]), ReduceRule(Sum)).wait().item()
                value.load_state_dict({**main, "before": main["before"] + int(since), "since": 0})
            elif _stateful(value):
                value.load_state_dict(functions.broadcast_object(value.state_dict()))
        self.save()

    def _resume(self, file: Path) -> bool:
        """Restore an earlier commit on the main rank; return False if there is none."""
        self._file = file

        def read() -> str | None:
            if not file.exists():
                return None
            self._saved, whence = commits.read_commit(file)
            try:
                self.restore()
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                why = str(error).strip().splitlines()[0]
                raise UserError(f"{file} does not fit this script ({why}); remove it to start anew") from None
            return whence

        whence = broadcast_from_main(read)
        if whence is not None and world.rank() == 0:
            warn(f"paceline.horovod: resuming from {whence}; remove it to start anew")
        return whence is not None


class ObjectState(ElasticState):
    """Plain values; Horovod's first two arguments are accepted and ignored."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:
        super().__init__(**values)


class TorchState(ElasticState):
    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        given = {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        super().__init__(**given, **values)


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Wrap `func(state, …)` to start from the last commit, or from the main rank's state."""

    @functools.wraps(func)
    def call(state: ElasticState, *args: Any, **options: Any) -> T:
        world.init()
        commits.check_commit(state._saved)
        file = commits.default_commit_file()
        if state._resume(file):
            state.on_reset()
        state.sync()
        result = func(state, *args, **options)
        if world.rank() == 0:
            file.unlink(missing_ok=True)
        return result

    return call


def _stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _copy_value(value: Any) -> Any:
    return copy.deepcopy(value.state_dict() if _stateful(value) else value)


def _scale_sampler_counts(saved: dict[str, Any]) -> dict[str, Any]:
    """Count samples for all ranks: each has processed as many as the main rank."""
    return {
        name: {**value, "before": value["before"] + value["since"] * world.size(), "since": 0}
        if isinstance(value, dict) and value.keys() == {"epoch", "before", "since"}
        else value
        for name, value in saved.items()
    }
