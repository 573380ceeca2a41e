"""Resume after a failure: state that is committed to disk, and ranks that a launcher restarts.

Horovod keeps committed state in the memory of the ranks that survive. Here a commit is also a file, the launcher
(`paceline launch --restarts 3`, `torchrun --max-restarts 3`, a requeued job) restarts all ranks, in the same or
another number, and `run` starts from that file.
"""

import copy
import functools
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten, treespec_dumps, treespec_loads
from torch.utils.data import Sampler

from paceline.errors import UserError, get_first_line
from paceline.horovod import functions, world
from paceline.horovod.async_ops import ReduceRule, Sum, start_reduce
from paceline.io.files import check_regular, write_atomic
from paceline.io.terminal import warn
from paceline.launch.process_group import broadcast_from_main

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

T = TypeVar("T")
WRITE_EVERY_S = 2.0
KEY = "paceline"
STATE_HOLDS = "an elastic state holds numbers, text, tensors, lists and dicts of them, and objects with state_dict()"


class ElasticSampler(Sampler[int]):
    """Skip samples that were processed before a restart, on any number of ranks.

    Each rank records its own; counts are summed and the rest is divided anew when the state is synchronised.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.before = 0  # processed by all ranks at the last reset
        self.since = 0  # processed by this rank since then
        self.reset()

    @property
    def processed_num(self) -> int:
        return self.before + self.since

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. Call it at the end of the one before, so that a failure does not lose its rest."""
        self.epoch, self.before = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        self.since += len(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Any) -> None:
        self.since += len(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        return self.mine[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "before": self.before, "since": self.since}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.before = state["epoch"], state["before"]
        self.reset()
        self.since = state["since"]

    def reset(self) -> None:
        """Divide the unprocessed samples over the current ranks; the first few repeat to make it even."""
        ranks, indices = world.size(), list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(indices)
        rest = indices[self.before :]
        repeated = islice(cycle(rest), -len(rest) % ranks)
        self.mine = [*rest, *repeated][world.rank() :: ranks]
        self.since = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)


class State:
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
        """Save the state; the main rank writes it at most every two seconds."""
        self.save()
        if self._file is not None and world.rank() == 0 and time.monotonic() >= self._next_write_s:
            write_commit(self._file, _scale_sampler_counts(self._saved))
            self._next_write_s = time.monotonic() + WRITE_EVERY_S

    def save(self) -> None:
        states = {name: value.state_dict() for name, value in self._values.items() if _has_state_dict(value)}
        self._saved = {name: copy.deepcopy(value) for name, value in (self._values | states).items()}

    def restore(self) -> None:
        """Restore what was saved last."""
        for name, saved in self._saved.items():
            now: Any = self._values.get(name)
            if _has_state_dict(now):
                now.load_state_dict(copy.deepcopy(saved))
            elif isinstance(saved, Tensor) and isinstance(now, Tensor):
                self._values[name] = saved.clone().to(now.device)
            else:
                self._values[name] = copy.deepcopy(saved)

    def sync(self) -> None:
        """Broadcast the main rank's values, and sum what samplers have processed."""
        plain = {name: value for name, value in self._values.items() if not _has_state_dict(value)}
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
            elif _has_state_dict(value):
                value.load_state_dict(functions.broadcast_object(value.state_dict()))
        self.save()

    def _resume(self, file: Path) -> bool:
        """Restore an earlier commit on the main rank; return False if there is none."""
        self._file = file

        def read() -> str | None:
            if not file.exists():
                return None
            self._saved, origin = read_commit(file)
            try:
                self.restore()
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                problem = f"does not fit this script ({get_first_line(error)}); remove it to start anew"
                raise UserError(f"{file} {problem}", code="conflict", key=str(file)) from None
            return origin

        origin = broadcast_from_main(read)
        if origin is not None and world.rank() == 0:
            warn(f"paceline.horovod: resuming from {origin}; remove it to start anew")
        return origin is not None


class ObjectState(State):
    """Plain values; Horovod's first two arguments are accepted and ignored."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:
        super().__init__(**values)


class TorchState(State):
    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Wrap `func(state, …)` to start from the last commit, or from the main rank's state."""

    @functools.wraps(func)
    def call(state: State, *args: Any, **options: Any) -> T:
        world.init()
        pack_state(state._saved)  # raises for what cannot be written
        file = Path(f"elastic-{Path(sys.argv[0]).stem or 'state'}.safetensors")
        if state._resume(file):
            state.on_reset()
        state.sync()
        result = func(state, *args, **options)
        if world.rank() == 0:
            file.unlink(missing_ok=True)
        return result

    return call


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _scale_sampler_counts(saved: dict[str, Any]) -> dict[str, Any]:
    """Count samples for all ranks: each has processed as many as the main rank."""
    samplers = {n: v for n, v in saved.items() if isinstance(v, dict) and v.keys() == {"epoch", "before", "since"}}
    for name, value in samplers.items():
        samplers[name] = {**value, "before": value["before"] + value["since"] * world.size(), "since": 0}
    return saved | samplers


def write_commit(file: Path, state: dict[str, Any]) -> None:
    tensors, about = pack_state(state)
    about |= {"command": shlex.join(sys.argv), "time_s": time.time()}
    write_atomic(file, save(tensors, metadata={KEY: json.dumps(about)}))


def pack_state(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a state by the places of its leaves, and all else as JSON has it; UserError for others."""
    leaves, structure = tree_flatten_with_path(state)
    tensors: dict[str, Tensor] = {}
    plain: list[Any] = []
    for place, (path, leaf) in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            tensors[str(place)] = leaf.detach().cpu().contiguous().clone()
        elif not isinstance(leaf, bool | int | float | str | None):
            key = f"state{keystr(path)}"
            raise UserError(f"{key} is a {type(leaf).__name__}; {STATE_HOLDS}", code="not-supported", key=key)
        plain.append(None if isinstance(leaf, Tensor) else leaf)
    return tensors, {"structure": treespec_dumps(structure), "leaves": plain}


def read_commit(file: Path) -> tuple[dict[str, Any], str]:
    """Return the state and a description of its origin."""
    try:
        check_regular(file)
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})[KEY])
            for place in opened.keys():  # noqa: SIM118
                about["leaves"][int(place)] = opened.get_tensor(place)
            state = tree_unflatten(about["leaves"], treespec_loads(about["structure"]))
            age_s = max(0.0, time.time() - about["time_s"])
            return state, f"{file}, committed {age_s:.0f} s ago by  {about['command']}"
    except Exception as error:
        message = f"{file} is not a committed state ({error}); remove it to start anew"
        raise UserError(message, code="damaged", key=str(file)) from None
