"""Record the gradient buckets of DistributedDataParallel: when each is in flight, and its backward pass.

Its reducer sums them in the script's process group. A group around that one takes its place, notes the moments and
hands everything on. A communication hook would tell as much and cost more: with any hook set, the reducer no longer
divides gradients while it copies them. If the script has its own hook, it is wrapped.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.measurement.scripts.step_recorder import BUCKET, StepRecorder

CallScope = Callable[[], AbstractContextManager[None]]  # calls inside belong to the outer one
PASSES = count()


class TimedGroup(dist.ProcessGroup):
    """The process group of a reducer, which sums its buckets and, once, broadcasts their order."""

    def __init__(self, group: dist.ProcessGroup, notes: StepRecorder) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._notes = notes
        self._backward = next(PASSES)
        self._sent: set[int] = set()

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        return self._group.broadcast(tensors, options)

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        bucket = id(tensors[0])  # the reducer keeps it, and sends it once in a pass
        if bucket in self._sent:
            self._backward = next(PASSES)
            self._sent.clear()
        self._sent.add(bucket)
        begin = self._notes.mark()
        work = self._group.allreduce(tensors, options)
        self._notes.note_until_done(BUCKET, begin, work.get_future(), self._backward)
        return work


GROUPS: WeakKeyDictionary[DistributedDataParallel, TimedGroup] = WeakKeyDictionary()
"""By model; a reducer does not keep its group alive."""


def swap_groups(watching: bool) -> None:
    for model, group in GROUPS.items():
        model.reducer._update_process_group(group if watching else model.process_group)


def watch_buckets(notes: StepRecorder, entered: CallScope) -> None:
    build, register, register_builtin = (
        getattr(DistributedDataParallel, name)
        for name in ("__init__", "register_comm_hook", "_register_builtin_comm_hook")
    )

    @functools.wraps(build)
    def build_and_watch(model: Any, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        notes.ddp = True
        if model.process_group.size() > 1 and hasattr(model, "reducer"):
            GROUPS[model] = TimedGroup(model.process_group, notes)
            swap_groups(notes.watching)

    @functools.wraps(register)
    def register_timed(model: Any, state: Any, hook: Callable[..., Any]) -> None:
        register(model, state, _time_hook(notes, entered, hook))

    @functools.wraps(register_builtin)
    def register_unseen(model: Any, *args: Any, **kwargs: Any) -> None:
        """Stop recording: the hook sums its own buckets, whose backward pass is not known."""
        if GROUPS.pop(model, None) is not None:
            model.reducer._update_process_group(model.process_group)
        register_builtin(model, *args, **kwargs)

    notes.watchers.append(swap_groups)
    ddp: Any = DistributedDataParallel
    ddp.__init__ = build_and_watch
    ddp.register_comm_hook = register_timed
    ddp._register_builtin_comm_hook = register_unseen


def _time_hook(notes: StepRecorder, entered: CallScope, hook: Callable[..., Any]) -> Callable[..., Any]:
    backward = -1

    @functools.wraps(hook)
    def timed(state: Any, bucket: Any) -> Any:
        nonlocal backward
        if bucket.index() == 0:
            backward = next(PASSES)
        begin = notes.mark()
        with entered():
            future = hook(state, bucket)
        if notes.watching:
            notes.note_until_done(BUCKET, begin, future, backward)
        return future

    return timed
