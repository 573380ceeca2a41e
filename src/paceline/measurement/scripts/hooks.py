"""Hook torch, so that a `StepRecorder` records the steps of a script, its waits for batches and its collectives.

The steps of optimisers have public hooks; for the iterators of DataLoaders and the functions of torch.distributed,
functions around them take their places; for gradient buckets see `buckets`. The script's own results do not change.
"""

import atexit
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from paceline.measurement.scripts.command import RecordRequest
from paceline.measurement.scripts.step_recorder import (
    BLOCKING,
    FLIGHT,
    INPUT,
    WAIT,
    StepRecorder,
    describe_rank_mismatch,
)

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)


def install_hooks() -> None:
    request = RecordRequest.of(os.environ)
    if request is None:
        return
    import torch
    from torch.optim import optimizer

    notes = StepRecorder(request)
    optimizer.register_optimizer_step_pre_hook(notes.optimizer_begins)
    optimizer.register_optimizer_step_post_hook(notes.optimizer_ended)
    _hook_dataloader(notes)
    if torch.distributed.is_available():
        from paceline.measurement.scripts.buckets import watch_buckets

        calls = _CollectiveCalls()
        _check_process_group(notes)
        _hook_collectives(notes, calls)
        watch_buckets(notes, calls.entered)
    atexit.register(notes.close)


def _hook_dataloader(notes: StepRecorder) -> None:
    import torch
    from torch.utils.data import dataloader

    following = dataloader._BaseDataLoaderIter.__next__

    @functools.wraps(following)
    def timed(batches: Any) -> Any:
        begin = notes.mark()
        batch = following(batches)
        notes.workers = getattr(batches, "_num_workers", None)
        samples = count_batch_samples(batch, getattr(batches._index_sampler, "batch_size", None))
        notes.note(INPUT, begin, samples if torch.is_grad_enabled() else None)
        return batch

    cast(Any, dataloader._BaseDataLoaderIter).__next__ = timed


def count_batch_samples(batch: Any, batch_size: int | None = None) -> int:
    """Return the length of the first tensor or array of a batch; 0 without one.

    A list with a thing for each sample is as long as the loader's `batch_size`.
    """
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        if len(batch) == batch_size:
            return len(batch)
        return next((found for part in batch if (found := count_batch_samples(part, batch_size))), 0)
    shape: Sequence[int] = getattr(batch, "shape", ())
    return int(shape[0]) if len(shape) else 0


def _check_process_group(notes: StepRecorder) -> None:
    """Refuse a script that joins another number of ranks: it would wait for them for half an hour."""
    import torch.distributed as dist

    join = dist.init_process_group

    @functools.wraps(join)
    def checked(*args: Any, **kwargs: Any) -> Any:
        world = inspect.signature(join).bind_partial(*args, **kwargs).arguments.get("world_size", -1)
        if world not in (-1, notes.request.ranks):
            notes.refuse(describe_rank_mismatch(notes.request.ranks, world))
        return join(*args, **kwargs)

    _replace_function("init_process_group", checked)


def _replace_function(name: str, function: Callable[..., Any]) -> None:
    import torch.distributed as dist

    for module in (dist, dist.distributed_c10d):
        setattr(module, name, function)


class _CollectiveCalls(threading.local):
    """Whether this thread is inside a timed call: what that calls in turn belongs to it."""

    inside = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


def _hook_collectives(notes: StepRecorder, calls: _CollectiveCalls) -> None:
    import torch.distributed as dist

    for name in COLLECTIVES:
        if hasattr(dist, name):
            _replace_function(name, _time_call(notes, calls, getattr(dist, name)))
    wait = dist.Work.wait

    @functools.wraps(wait)
    def timed_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if calls.inside:
            return wait(work, *args, **kwargs)
        begin = notes.mark()
        done = wait(work, *args, **kwargs)
        notes.note(WAIT, begin)
        return done

    cast(Any, dist.Work).wait = timed_wait


def _time_call(notes: StepRecorder, calls: _CollectiveCalls, collective: Callable[..., Any]) -> Callable[..., Any]:
    import torch

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
                notes.note_until_done(FLIGHT, begin, work.get_future())
        if not works:
            # As with FSDP: compute does not wait for it here.
            aside = torch.cuda.is_initialized() and torch.cuda.current_stream() != torch.cuda.default_stream()
            notes.aside |= aside
            notes.note(FLIGHT if aside else BLOCKING, begin)
        return result

    return timed
