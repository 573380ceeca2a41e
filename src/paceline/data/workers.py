"""Worker processes that make a rank's samples, and how many of them pay.

They are forks of the rank, made before it touches a device or starts threads, and have its data without a copy. Which
samples come when is not theirs to decide: they are asked for batches by sample numbers and keys, so that any number of
them gives the same answer. A thread per worker asks and waits (paceline.data.prefetch).
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import queue
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from paceline.config import RunSpec
from paceline.config.registry import describe_error, format_user_trace
from paceline.data.samples import load_samples
from paceline.data.shared_memory import Message, pack_message, receive_message, send_message
from paceline.errors import PacelineError, RunFailed
from paceline.io.format import duration
from paceline.launch.environment import RankInfo
from paceline.launch.hang_traces import enable_stack_dump
from paceline.launch.root_cause import describe_exit
from paceline.launch.signals import STOP_SIGNALS
from paceline.workload import Samples, Workload

SPLITS = ("train", "test")
REMOTE = ("padded", "fixed_shape_batches")
"""What samples may be asked to make beside `batch`."""
MAX_AUTO_WORKERS = 16
"""Workers that `auto` starts on a rank; whoever wants more says how many."""
TOLERATED_WAIT_S = 0.002
"""A step waits so long for its samples without anybody noticing. A worker that idles costs next to nothing."""
MEASURED_S = 0.1
ROUNDS = 3
EXIT_TIMEOUT_S = 0.5
PR_SET_PDEATHSIG = 1


class WorkerDied(RunFailed):
    """A worker process ended without an answer."""


@dataclass
class Worker:
    number: int
    process: Any
    pipe: Connection

    def ask(self, *question: Any) -> Any:
        try:
            self.pipe.send(question)
            return receive_message(self.pipe)
        except (EOFError, OSError):
            self.process.join(EXIT_TIMEOUT_S)
            who = f"data worker {self.number} (pid {self.process.pid})"
            code = self.process.exitcode
            if code is None:
                raise WorkerDied(f"{who} does not answer") from None
            raise WorkerDied(str(describe_exit(who, code, time.time(), secondary=False).error)) from None

    def ask_no_more(self) -> None:
        """The worker sees the end of its questions. The pipe stays open for a thread that waits for an answer."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as ours:
            ours.shutdown(socket.SHUT_WR)


class Workers:
    """The worker processes of one rank; each is asked by one thread at a time."""

    def __init__(self, splits: Mapping[str, Samples | None], reference: str) -> None:
        self.splits, self.reference = splits, reference
        self.all: list[Worker] = []
        self.free: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def start(self, count: int) -> None:
        """Until there are so many."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or a fork would write once more what is in their buffers
        while len(self.all) < count:
            ours, theirs = multiprocessing.Pipe()
            not_its_own = [worker.pipe for worker in self.all] + [ours]
            process = multiprocessing.get_context("fork").Process(
                target=_serve, args=(theirs, self.splits, self.reference, not_its_own, os.getpid()), daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: no lock of theirs is used
                process.start()
            theirs.close()
            self.all.append(Worker(len(self.all), process, ours))
            self.free.put(self.all[-1])

    def ask(self, *question: Any) -> Any:
        """What a free worker answers; what it raised is raised here."""
        worker = self.free.get()
        try:
            answer = worker.ask(*question)
        finally:
            self.free.put(worker)
        if isinstance(answer, PacelineError):
            raise answer
        return answer

    def close(self) -> None:
        """They have nothing to save: one that does not leave at once is ended."""
        for worker in self.all:
            worker.ask_no_more()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for worker in self.all:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self.all.clear()


class WorkerSamples:
    """A split whose batches are made by worker processes."""

    beside_the_loop = True

    def __init__(self, split: str, samples: Samples, workers: Workers, why: str) -> None:
        self.split, self.samples, self._workers, self.why = split, samples, workers, why

    @property
    def workers(self) -> int:
        return len(self._workers.all)

    def __len__(self) -> int:
        return len(self.samples)

    def cost(self, ids: np.ndarray) -> np.ndarray:
        return self.samples.cost(ids)

    def batch(self, ids: np.ndarray, keys: np.ndarray) -> Any:
        return self._workers.ask(self.split, "batch", ids, keys)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.samples, name)
        return partial(self._workers.ask, self.split, name) if name in REMOTE else found


@contextmanager
def start_workers(workload: Workload, place: RankInfo, samples_per_step: int) -> Iterator[None]:
    """While entered, the workload's samples are those that worker processes make, as many as its run file asks for.

    `samples_per_step` are those of this rank.
    """
    splits = {split: load_samples(workload, split) for split in SPLITS}
    asked = getattr(workload.spec.data, "workers", 0)
    workers = Workers(splits, workload.spec.workload)
    try:
        why = (
            "" if splits["train"] is None else _start_as_asked(workers, splits["train"], asked, place, samples_per_step)
        )
        workload.served = splits
        if workers.all:
            workload.served = {
                split: samples if samples is None else WorkerSamples(split, samples, workers, why)
                for split, samples in splits.items()
            }
        yield
    finally:
        workload.served = {}
        workers.close()


def describe_workers(samples: Samples) -> list[str]:
    """Who makes the samples, where it is not a thread of the rank."""
    if isinstance(samples, WorkerSamples):
        return [f"{samples.workers} worker process{'es' * (samples.workers > 1)} for samples{samples.why}"]
    return [] if getattr(samples, "beside_the_loop", True) else ["samples are made between steps: data.workers=0"]


def list_worker_facts(spec: RunSpec, samples: Samples) -> dict[str, int]:
    """For the record: how many there are, where a run file can say so."""
    return {"workers": getattr(samples, "workers", 0)} if hasattr(spec.data, "workers") else {}


def cores_of(place: RankInfo) -> int:
    """Of this rank. srun and mpirun bind ranks to cores of their own; ranks of other launchers share those they see."""
    seen = len(os.sched_getaffinity(0))
    return seen if place.launcher in ("srun", "mpirun") else max(1, seen // place.local_world)


def _start_as_asked(
    workers: Workers, samples: Samples, asked: int | str, place: RankInfo, samples_per_step: int
) -> str:
    """Start as many as were asked for, or as pay; returns why, for people."""
    if isinstance(asked, int):
        workers.start(asked)
        return ""
    if hasattr(samples, "resident"):  # rows of memory: a thread picks them faster than a process sends them
        return ""
    workers.start(1)  # a measurement in this process could open what must not be open when it forks
    sample_s = workers.ask("train", MEASURE, samples_per_step)
    step_s, cores = sample_s * samples_per_step, cores_of(place)
    count = choose_worker_count(step_s, cores)
    if count == 1 and step_s < TOLERATED_WAIT_S and getattr(samples, "beside_the_loop", True):
        workers.close()
        return ""
    workers.start(count)
    one = f"a sample takes {duration(sample_s)}, the {samples_per_step} of a step {duration(step_s)} in one process"
    return f": {one}; this rank has {cores} core{'s' * (cores > 1)}"


def choose_worker_count(step_s: float, cores: int) -> int:
    """Workers, for samples of a step that take one process so long."""
    return max(1, min(cores, MAX_AUTO_WORKERS, math.ceil(step_s / TOLERATED_WAIT_S)))


# In the worker process

MEASURE = "measure"


def _serve(
    pipe: Connection, splits: Mapping[str, Samples], reference: str, not_ours: list[Connection], parent: int
) -> None:
    """Answer until the rank closes its end, or dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in STOP_SIGNALS:  # they are meant for the rank
        signal.signal(number, signal.SIG_IGN)
    for other in not_ours:
        other.close()
    enable_stack_dump()
    gc.freeze()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the rank is gone, or wants no more
        while True:
            split, what, *arguments = pipe.recv()
            send_message(pipe, _answer(splits[split], what, arguments, reference))


def _answer(samples: Samples, what: str, arguments: list[Any], reference: str) -> Message:
    try:
        make = partial(_measure_sample_s, samples) if what == MEASURE else getattr(samples, what)
        return pack_message(make(*arguments))
    except Exception as error:
        return pack_message(_to_error(error, reference))


def _to_error(error: Exception, reference: str) -> PacelineError:
    """What the rank raises for it: a traceback object does not leave its process, its text does."""
    if isinstance(error, PacelineError):
        return type(error)(str(error))
    trace = format_user_trace(error, reference)
    if not trace:  # a data set from elsewhere: all that lies below this file
        lower = error.__traceback__
        while lower is not None and lower.tb_frame.f_code.co_filename == __file__:
            lower = lower.tb_next
        trace = "".join(traceback.format_exception(type(error), error, lower)).rstrip()
    return RunFailed(f"the workload failed in a data worker: {describe_error(error)}\n\n{trace}")


def _measure_sample_s(samples: Samples, most: int) -> float:
    """Seconds that a sample takes in a batch, at best. Batches double up to that of a step, for a moment at most."""
    began, found = time.perf_counter(), math.inf
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most] * ROUNDS
    for size in sizes:
        ids = np.linspace(0, len(samples) - 1, size).astype(np.int64)  # from the whole of the data
        first = time.perf_counter()
        samples.batch(ids, np.zeros_like(ids))
        found = min(found, (time.perf_counter() - first) / size)
        if time.perf_counter() - began > MEASURED_S:
            break
    return found
