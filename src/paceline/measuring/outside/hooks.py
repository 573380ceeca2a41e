"""Hooks on torch that tell `StepNotes` what a script does: its steps, its waits for batches, its collectives.

The steps of optimisers and the gradient buckets of DistributedDataParallel have public hooks; for the iterators of
DataLoaders and the functions of torch.distributed, functions around them take their places. The script's own results
do not change: a communication hook of its own stays, and where it has none, torch's equal of the usual sum is set.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

from paceline.measuring.outside.request import Request
from paceline.measuring.outside.step_notes import StepNotes, other_ranks

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)


def attach() -> None:
    """Set all hooks in this process, if it was asked for."""
    request = Request.of(os.environ)
    if request is None:
        return
    import torch

    notes = StepNotes(request)
    _steps(notes)
    _inputs(notes)
    if torch.distributed.is_available():
        calls = _Calls(notes)
        _joining(notes)
        _collectives(calls)
        _buckets(calls)
    atexit.register(notes.close)


def _steps(notes: StepNotes) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: notes.optimizer_begins(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: notes.optimizer_ended(optimizer))


def _inputs(notes: StepNotes) -> None:
    from torch.utils.data import dataloader

    following = dataloader._BaseDataLoaderIter.__next__

    @functools.wraps(following)
    def timed(batches: Any) -> Any:
        begin = notes.mark()
        batch = following(batches)
        notes.workers = getattr(batches, "_num_workers", None)
        notes.loaded(begin, samples_in(batch, getattr(batches._index_sampler, "batch_size", None)))
        return batch

    dataloader._BaseDataLoaderIter.__next__ = timed


def samples_in(batch: Any, batch_size: int | None = None) -> int:
    """The length of the first tensor or array of a batch; 0 where there is none.

    A list with a thing for each sample is as long as the loader's `batch_size`.
    """
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        if len(batch) == batch_size:
            return len(batch)
        return next((found for part in batch if (found := samples_in(part, batch_size))), 0)
    shape: Sequence[int] = getattr(batch, "shape", ())
    return int(shape[0]) if len(shape) else 0


def _joining(notes: StepNotes) -> None:
    """A script that asks for another number of ranks than there are would wait for them for half an hour."""
    import torch.distributed as dist

    join = dist.init_process_group

    @functools.wraps(join)
    def checked(*args: Any, **kwargs: Any) -> Any:
        world = inspect.signature(join).bind_partial(*args, **kwargs).arguments.get("world_size", -1)
        if world not in (-1, notes.request.ranks):
            notes.refuse(other_ranks(notes.request.ranks, world))
        return join(*args, **kwargs)

    _replace("init_process_group", checked)


def _replace(name: str, function: Callable[..., Any]) -> None:
    import torch.distributed as dist

    for module in (dist, dist.distributed_c10d):
        setattr(module, name, function)


class _Calls:
    """Calls of collectives: those that are made inside another belong to it."""

    def __init__(self, notes: StepNotes) -> None:
        self.notes = notes
        self._inside = threading.local()

    @property
    def inside(self) -> bool:
        return getattr(self._inside, "now", False)

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._inside.now = True
        try:
            yield
        finally:
            self._inside.now = False


def _collectives(calls: _Calls) -> None:
    import torch.distributed as dist

    for name in COLLECTIVES:
        if hasattr(dist, name):
            _replace(name, _timed_call(calls, getattr(dist, name)))
    wait, notes = dist.Work.wait, calls.notes

    @functools.wraps(wait)
    def timed_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if calls.inside:
            return wait(work, *args, **kwargs)
        begin = notes.mark()
        done = wait(work, *args, **kwargs)
        notes.waited(begin)
        return done

    dist.Work.wait = timed_wait


def _timed_call(calls: _Calls, collective: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    notes = calls.notes

    @functools.wraps(collective)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if calls.inside or torch.compiler.is_compiling():
            return collective(*args, **kwargs)
        begin = notes.mark()
        with calls.entered():
            result = collective(*args, **kwargs)
        works = [work for work in (result if isinstance(result, list) else [result]) if hasattr(work, "get_future")]
        for work in works:
            with suppress(RuntimeError):  # a backend without futures: only its waits are seen
                work.get_future().add_done_callback(lambda future: notes.flown(begin))
        if not works:
            aside = _in_a_stream_of_its_own()
            notes.aside |= aside
            notes.flown(begin, waited=not aside)
        return result

    return timed


def _in_a_stream_of_its_own() -> bool:
    """As FSDP does on CUDA devices: what computes then does not wait for it here."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.current_stream() != torch.cuda.default_stream()


def _buckets(calls: _Calls) -> None:
    """The gradient buckets of DistributedDataParallel, through its communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    hooked: WeakSet[Any] = WeakSet()
    build, register, register_builtin = (
        getattr(DistributedDataParallel, name)
        for name in ("__init__", "register_comm_hook", "_register_builtin_comm_hook")
    )

    @functools.wraps(register)
    def register_timed(model: Any, state: Any, hook: Callable[..., Any]) -> None:
        hooked.add(model)
        register(model, state, _timed_hook(calls, hook))

    @functools.wraps(register_builtin)
    def register_unseen(model: Any, *args: Any, **kwargs: Any) -> None:
        hooked.add(model)
        register_builtin(model, *args, **kwargs)

    @functools.wraps(build)
    def build_and_watch(model: Any, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)

        def at_first_forward(model: Any, inputs: Any) -> None:
            """By then a script has set its own hook, if it has one."""
            once.remove()
            if model not in hooked and model.process_group.size() > 1:
                register_timed(model, model.process_group, allreduce_hook)

        once = model.register_forward_pre_hook(at_first_forward)

    DistributedDataParallel.__init__ = build_and_watch
    DistributedDataParallel.register_comm_hook = register_timed
    DistributedDataParallel._register_builtin_comm_hook = register_unseen


def _timed_hook(calls: _Calls, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Notes each bucket, and the end of a backward pass: after the last bucket there is nothing left to compute."""
    notes = calls.notes
    lock = threading.Lock()
    in_flight = 0
    last: Any = None

    @functools.wraps(hook)
    def timed(state: Any, bucket: Any) -> Any:
        nonlocal in_flight, last
        begin = notes.mark()
        with lock:
            in_flight += 1
            last = begin if bucket.is_last() else None
        with calls.entered():
            future = hook(state, bucket)

        def landed(future: Any) -> Any:
            nonlocal in_flight
            notes.flown(begin)
            with lock:
                in_flight -= 1
                tail = last if not in_flight else None
            if tail is not None:
                notes.waited(tail)
            return future.value()

        return future.then(landed)

    return timed
