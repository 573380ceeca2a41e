"""Worker processes that make a rank's samples, and the choice of their number.

They are forks of the rank, made before it uses a device or starts threads. They are asked for batches by sample numbers
and keys, so that any number of them gives the same result.
"""

import ctypes
import gc
import io
import math
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import RunSpec
from paceline.config.registry import describe_error, format_user_trace
from paceline.data.samples import choose_few, load_samples
from paceline.errors import PacelineError, RunFailed
from paceline.io.format import duration
from paceline.launch.environment import RankInfo
from paceline.launch.hang_traces import enable_stack_dump
from paceline.launch.root_cause import describe_exit
from paceline.launch.signals import STOP_SIGNALS
from paceline.workload import Samples, Workload

SPLITS = ("train", "test")
REMOTE = ("padded", "fixed_shape_batches")  # methods of samples that workers call, beside `batch`
MAX_AUTO_WORKERS = 16  # that `auto` starts on a rank
TOLERATED_WAIT_S = 0.002  # a step may wait so long for its samples
MEASURED_S = 0.1
ROUNDS = 3
EXIT_TIMEOUT_S = 0.5
PR_SET_PDEATHSIG = 1
ALIGNMENT = 64

TensorSlot = tuple[int, torch.dtype, torch.Size]  # begin in the file, dtype, shape of a tensor


class WorkerDied(RunFailed):
    """A worker process ended without an answer."""


@dataclass
class Worker:
    number: int
    process: Any
    pipe: Connection

    def ask(self, *request: Any) -> Any:
        try:
            self.pipe.send(request)
            return receive_message(self.pipe)
        except (EOFError, OSError):
            self.process.join(EXIT_TIMEOUT_S)
            who, code = f"data worker {self.number} (pid {self.process.pid})", self.process.exitcode
            if code is None:
                raise WorkerDied(f"{who} does not answer") from None
            raise WorkerDied(str(describe_exit(who, code, time.time(), secondary=False).error)) from None


class Workers:
    def __init__(self, splits: Mapping[str, Samples | None], reference: str) -> None:
        self.splits, self.reference = splits, reference
        self.all: list[Worker] = []
        self.free: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def start(self, count: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # a fork would write their buffers once more
        while len(self.all) < count:
            ours, theirs = multiprocessing.Pipe()
            inherited = [worker.pipe for worker in self.all] + [ours]
            given = theirs, self.splits, self.reference, inherited, os.getpid()
            process = multiprocessing.get_context("fork").Process(target=_serve_rank, args=given, daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads: none of their locks is used
                process.start()
            theirs.close()
            self.all.append(Worker(len(self.all), process, ours))
            self.free.put(self.all[-1])

    def ask(self, *request: Any) -> Any:
        worker = self.free.get()
        try:
            answer = worker.ask(*request)
        finally:
            self.free.put(worker)
        if isinstance(answer, PacelineError):
            raise answer
        return answer

    def close(self) -> None:
        """Kill the workers, which have nothing to save."""
        for worker in self.all:
            worker.process.kill()
        for worker in self.all:
            worker.process.join()
            worker.pipe.close()
        self.all.clear()


class WorkerSamples:
    beside_the_loop = True

    def __init__(self, split: str, samples: Samples, workers: Workers, reason: str) -> None:
        self.split, self.samples, self._workers, self.reason = split, samples, workers, reason

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
    """Serve the workload's samples from worker processes, as many as its run file asks for.

    `samples_per_step` are those of this rank.
    """
    splits = {split: load_samples(workload, split) for split in SPLITS}
    workers = Workers(splits, workload.spec.workload)
    try:
        reason, train = "", splits["train"]
        if train is not None:
            reason = _start_requested(workers, train, workload.spec, place, samples_per_step)
        workload.served = splits
        if workers.all:
            served = {split: samples for split, samples in splits.items() if samples is not None}
            served = {split: WorkerSamples(split, samples, workers, reason) for split, samples in served.items()}
            workload.served = {**splits, **served}
        yield
    finally:
        workload.served = {}
        workers.close()


def describe_workers(samples: Samples) -> list[str]:
    if isinstance(samples, WorkerSamples):
        return [f"{samples.workers} worker process{'es' * (samples.workers > 1)} for samples{samples.reason}"]
    return [] if getattr(samples, "beside_the_loop", True) else ["samples are made between steps: data.workers=0"]


def list_worker_facts(spec: RunSpec, samples: Samples) -> dict[str, int]:
    return {"workers": getattr(samples, "workers", 0)} if hasattr(spec.data, "workers") else {}


def cores_of(place: RankInfo) -> int:
    """Return the cores of this rank. srun and mpirun bind ranks to cores; ranks of other launchers share theirs."""
    seen = len(os.sched_getaffinity(0))
    return seen if place.launcher in ("srun", "mpirun") else max(1, seen // place.local_world)


def _start_requested(workers: Workers, samples: Samples, spec: RunSpec, place: RankInfo, samples_per_step: int) -> str:
    """Start the workers of a run file, and return the reason of a number that was measured."""
    if isinstance(count := getattr(spec.data, "workers", 0), int):
        workers.start(count)
        return ""
    if hasattr(samples, "resident"):  # rows in memory: a thread gathers them faster than a process sends them
        return ""
    workers.start(1)  # measuring in this process could open what must not be open when it forks
    sample_s = workers.ask("train", MEASURE, samples_per_step)
    step_s, cores = sample_s * samples_per_step, cores_of(place)
    count = choose_worker_count(step_s, cores)
    if count == 1 and step_s < TOLERATED_WAIT_S and getattr(samples, "beside_the_loop", True):
        workers.close()
        return ""
    workers.start(count)
    took = f"a sample takes {duration(sample_s)}, the {samples_per_step} of a step {duration(step_s)} in one process"
    return f": {took}; this rank has {cores} core{'s' * (cores > 1)}"


def choose_worker_count(step_s: float, cores: int) -> int:
    return max(1, min(cores, MAX_AUTO_WORKERS, math.ceil(step_s / TOLERATED_WAIT_S)))


# In the worker process

MEASURE = "measure"


def _serve_rank(
    pipe: Connection, splits: Mapping[str, Samples], reference: str, inherited: list[Connection], parent: int
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in STOP_SIGNALS:  # meant for the rank
        signal.signal(number, signal.SIG_IGN)
    for other in inherited:
        other.close()
    enable_stack_dump()
    gc.freeze()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the rank is gone, or closed the pipe
        while True:
            split, what, *arguments = pipe.recv()
            send_message(pipe, _answer(splits[split], what, arguments, reference))


def _answer(samples: Samples, what: str, arguments: list[Any], reference: str) -> "Message":
    try:
        make = partial(_measure_sample_s, samples) if what == MEASURE else getattr(samples, what)
        return Message(make(*arguments))
    except Exception as error:
        return Message(_to_error(error, reference))


def _to_error(error: Exception, reference: str) -> PacelineError:
    """Convert an error for the rank, with its traceback as text: the object cannot leave the process."""
    if isinstance(error, PacelineError):
        return type(error)(str(error))
    trace = format_user_trace(error, reference)
    if not trace:  # a data set of another library
        trace = "".join(traceback.format_exception(error)).rstrip()
    return RunFailed(f"the workload failed in a data worker: {describe_error(error)}\n\n{trace}")


def _measure_sample_s(samples: Samples, most: int) -> float:
    """Return the least seconds per sample in a batch. Batches double up to that of a step."""
    began, found = time.perf_counter(), math.inf
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most] * ROUNDS
    for size in sizes:
        ids = choose_few(samples, size)
        first = time.perf_counter()
        samples.batch(ids, np.zeros_like(ids))
        found = min(found, (time.perf_counter() - first) / len(ids))
        if time.perf_counter() - began > MEASURED_S:
            break
    return found


# Batches from one process to another. All tensors of a message are in one anonymous file, whose descriptor is sent: it
# uses nothing of /dev/shm, and is freed with its last tensor.


class Message(ForkingPickler):
    """A pickle, and the tensors that are sent beside it."""

    def __init__(self, thing: Any) -> None:
        self.pickle, self.tensors, self.bytes = io.BytesIO(), list[tuple[TensorSlot, Tensor]](), 0
        super().__init__(self.pickle, pickle.HIGHEST_PROTOCOL)
        self.dump(thing)

    def persistent_id(self, thing: Any) -> TensorSlot | None:
        if type(thing) is not Tensor or thing.layout != torch.strided or thing.device.type != "cpu":
            return None
        if thing.is_quantized or thing.is_conj() or thing.is_neg():
            return None
        place = self.bytes, thing.dtype, thing.shape
        self.tensors.append((place, thing.detach()))
        self.bytes = -(-(self.bytes + thing.nbytes) // ALIGNMENT) * ALIGNMENT
        return place


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Tensor | None) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, place: TensorSlot) -> Tensor:
        return torch.empty(place[2], dtype=place[1]) if self.memory is None else _view_at(self.memory, place)


def send_message(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(message.bytes.to_bytes(8, "little"))
    pipe.send_bytes(message.pickle.getvalue())
    if not message.bytes:
        return
    with open(os.memfd_create("paceline-batch"), "r+b") as file:
        file.truncate(message.bytes)
        memory = _map_file(file.fileno(), message.bytes)
        for place, tensor in message.tensors:
            _view_at(memory, place).copy_(tensor)
        send_handle(pipe, file.fileno(), None)


def receive_message(pipe: Connection) -> Any:
    """Receive what `send_message` sent; it may be unpickled, as it comes from our own process."""
    size = int.from_bytes(pipe.recv_bytes(), "little")
    content = io.BytesIO(pipe.recv_bytes())
    if not size:
        return _TensorUnpickler(content, None).load()
    with open(recv_handle(pipe), "rb") as file:
        memory = _map_file(file.fileno(), size)
    return _TensorUnpickler(content, memory).load()


def _map_file(descriptor: int, size: int) -> Tensor:
    """Map the file as bytes; the mapping outlives the descriptor."""
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)


def _view_at(memory: Tensor, place: TensorSlot) -> Tensor:
    begin, dtype, shape = place
    return memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
