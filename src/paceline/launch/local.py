"""Start the ranks of one machine, wait for them, and raise the root cause if one fails.

The ranks are forks of a new Python process (`fork_server.py`) that imports nothing of the calling script or notebook.
The launcher itself never imports torch.

    a rank fails       its peers get GRACE_S to end, then they are killed; the root cause is raised
    SIGTERM, Ctrl-C    forwarded to all ranks, once; they save and return, and so does `run_ranks`
    second Ctrl-C      the ranks are killed at once
    launcher killed    the ranks notice it, and stop as after SIGTERM
"""

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import RunFailed, UserError
from paceline.io.terminal import warn
from paceline.launch.environment import LAUNCHER_VARIABLE, LOCALHOST
from paceline.launch.hang_diagnosis import ProcessMonitor
from paceline.launch.heartbeat import STOPPED, read_process_state
from paceline.launch.root_cause import RankFailure, describe_exception, describe_exit, find_root_cause
from paceline.launch.signals import STOP_SIGNALS, StopRequest

T = TypeVar("T")

POLL_S = 0.05
GRACE_S = 3.0
EXIT_TIMEOUT_S = 60.0
FORK_SERVER_RANK = -1
FORK_SERVER_NAME = "the process that starts the ranks"
PRELOAD = ("paceline.launch.process_group",)  # imports torch


def run_ranks(
    worker: Callable[..., T],
    args: tuple[object, ...],
    ranks: int,
    preload: Sequence[str] = PRELOAD,
    monitor: ProcessMonitor | None = None,
    inherit: Sequence[int] = (),
) -> list[T]:
    """Call `worker(*args)` in `ranks` new processes and return their results, in the order of the ranks.

    The worker finds its rank by `detect_rank`. It must be importable by name, its arguments and result picklable.
    `preload` is imported once for all ranks, without touching a GPU. `monitor` ends a run whose process stays stopped.
    The ranks get the descriptors `inherit`, such as that of a lock.
    """
    work = io.BytesIO()
    _WorkPickler(work).dump((worker, args))
    message = pickle.dumps((sys.path, tuple(preload), work.getvalue()))
    with StopRequest() as stop, _start_ranks(ranks, message, inherit) as processes:
        processes.monitor = monitor
        supervise_ranks(processes, stop)
        failures = processes.failures()
        if not failures:
            return [rank.result[0] for rank in processes.ranks]
        if stop.interrupted_twice:
            raise _stop_error("killed by the second Ctrl-C", signal.SIGINT)
        first = find_root_cause(failures)
        if stop.requested and first.signal in STOP_SIGNALS:
            reason = f"stopped by {stop.signal_name} before the ranks could save and stop"
            raise _stop_error(reason, stop.received[0])
        raise first.error


def _stop_error(reason: str, number: int) -> RunFailed:
    """Return the error of a run that a signal ended without a checkpoint, with the exit code of a shell."""
    error = RunFailed(reason)
    error.exit_code = 128 + number
    return error


@dataclass
class _RankProcess:
    number: int
    pipe: Connection
    pid: int | None = None
    ended: bool = False
    killed: bool = False
    result: list[Any] = field(default_factory=list)
    failure: RankFailure | None = None

    def listen(self) -> None:
        """Receive the outcome, if it has arrived."""
        outcome = _receive(self.pipe)
        if isinstance(outcome, RankFailure):
            self.failure = self.failure or outcome  # what the launcher observed came first
        elif outcome is not None:
            self.result = [outcome[0]]

    def end(self, code: int, time_s: float) -> None:
        self.ended = True
        self.listen()
        if not self.result and self.failure is None:
            self.failure = describe_exit(self.number, code, time_s, secondary=self.killed)

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None and not self.ended:
            self.killed = self.killed or number == signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class _RankProcesses:
    server: subprocess.Popen[bytes]
    control: Connection
    ranks: list[_RankProcess]
    server_failure: RankFailure | None = None
    stop_sent: bool = False
    monitor: ProcessMonitor | None = None

    @property
    def over(self) -> bool:
        return self.server_failure is not None or all(rank.ended for rank in self.ranks)

    @property
    def leaving(self) -> bool:
        """Return whether all ranks have done their work and only have to exit."""
        return all(rank.result for rank in self.ranks)

    def failures(self) -> list[RankFailure]:
        known = (*(rank.failure for rank in self.ranks), self.server_failure)
        return [failure for failure in known if failure is not None]

    def listen(self) -> None:
        """Wait briefly for messages: outcomes from the ranks, process ids and exits from the fork server."""
        wait([self.control, *(rank.pipe for rank in self.ranks if not rank.pipe.closed)], POLL_S)
        for rank in self.ranks:
            rank.listen()
        while not self.over and (message := _receive(self.control)) is not None:
            match message:
                case RankFailure():
                    self.server_failure = message
                case list(pids):
                    for rank, pid in zip(self.ranks, pids, strict=True):
                        rank.pid = pid
                case (number, code, time_s):
                    self.ranks[number].end(code, time_s)
        self._check_stopped()
        if self.control.closed and not self.over:
            code = self.server.wait()
            if self.leaving:  # nobody is left to report their exits
                self.signal(signal.SIGKILL)
                self.ranks = [replace(rank, ended=True) for rank in self.ranks]
            else:
                self.server_failure = describe_exit(FORK_SERVER_NAME, code, time.time(), secondary=False)

    def _check_stopped(self) -> None:
        """End the run for a process that a signal stopped and nobody continued, unless its work is done."""
        if self.monitor is None:
            return
        pids = {rank.number: rank.pid for rank in self.ranks if rank.pid is not None and not rank.ended}
        if failures := self.failures():
            if read_process_state(self.server.pid)[0] == STOPPED:  # ranks waited for others that it never forked
                self._give_up_server()
            elif all(failure.secondary for failure in failures):  # a rank may have been stopped before its heartbeat
                for number, pid in pids.items():
                    if read_process_state(pid)[0] == STOPPED:
                        self._blame_stopped(number, pid)
            else:
                self._check_aborted(failures)
            return
        for number in self.monitor.find_stopped({**pids, FORK_SERVER_RANK: self.server.pid}):
            if number == FORK_SERVER_RANK:
                self._give_up_server()
            elif self.ranks[number].result:
                self.ranks[number].signal(signal.SIGKILL)
            else:
                self._blame_stopped(number, pids[number])

    def _blame_stopped(self, number: int, pid: int) -> None:
        if self.monitor is not None and self.ranks[number].failure is None:
            self.ranks[number].failure = describe_exception(number, self.monitor.describe_stopped(number, pid))

    def _give_up_server(self) -> None:
        self.server.kill()
        if not self.leaving:
            message = f"{FORK_SERVER_NAME} (pid {self.server.pid}) was stopped by a signal such as SIGSTOP"
            error = RunFailed(message, code="rank-unresponsive")
            self.server_failure = RankFailure(0, error, time.time(), secondary=False)

    def _check_aborted(self, failures: list[RankFailure]) -> None:
        """If NCCL aborted a rank that waited too long, blame the rank that it waited for."""
        if self.monitor is None or len(failures) > 1 or failures[0].signal != signal.SIGABRT:
            return
        if (silent := self.monitor.find_awaited(failures[0].rank)) is not None:
            self.ranks[failures[0].rank].failure = replace(failures[0], secondary=True)
            self.ranks[silent.rank].failure = describe_exception(silent.rank, silent)

    def forward_signal(self, received: signal.Signals) -> None:
        """Send SIGTERM to the ranks, whichever stop signal arrived; a second one changes nothing."""
        if self.stop_sent:
            return
        self.stop_sent = True
        hint = " (Ctrl-C again kills them)" if received == signal.SIGINT else ""
        warn(f"{received.name}: the ranks stop when they have saved{hint}")
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        if all(rank.pid is None for rank in self.ranks) and self.server.poll() is None:
            self.server.send_signal(number)  # no rank is forked yet
        for rank in self.ranks:
            rank.signal(number)


def _receive(pipe: Connection) -> Any:
    """Return the next message, or None if there is none; close a pipe whose other end is gone."""
    try:
        return pickle.loads(pipe.recv_bytes()) if not pipe.closed and pipe.poll() else None
    except (EOFError, OSError):
        pipe.close()
        return None


def supervise_ranks(processes: Any, stop: StopRequest) -> None:
    """Wait until every rank has ended: forward stop signals, and kill the peers of a failed rank."""
    forwarded = 0
    deadline_s: float | None = None
    while not processes.over:
        processes.listen()
        for number in stop.received[forwarded:]:
            forwarded += 1
            processes.forward_signal(number)
        if deadline_s is None:
            if processes.failures():
                deadline_s = time.monotonic() + GRACE_S
            elif processes.leaving:
                deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        if stop.interrupted_twice or (deadline_s is not None and time.monotonic() > deadline_s):
            processes.signal(signal.SIGKILL)


class _WorkPickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if getattr(thing, "__module__", None) == "__main__" and hasattr(thing, "__qualname__"):
            message = f"{thing.__qualname__} is defined in the running script or notebook, which ranks cannot see"
            raise UserError(f"{message}; move it to a module and import it from there", code="invalid-workload")
        return NotImplemented


@contextmanager
def _start_ranks(ranks: int, work: bytes, inherit: Sequence[int]) -> Iterator[_RankProcesses]:
    with reserve_port() as port:
        processes = _start_fork_server(ranks, port, inherit)
        try:
            with suppress(OSError):  # it died already; `listen` finds out how
                processes.control.send_bytes(work)
            yield processes
        finally:
            processes.signal(signal.SIGKILL)
            if not processes.over:
                processes.server.kill()
            processes.server.wait()
            for pipe in (processes.control, *(rank.pipe for rank in processes.ranks)):
                pipe.close()


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a free port until rank 0 listens on it: bound here as well, but without listening."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOCALHOST, 0))
        yield reserved.getsockname()[1]


def _start_fork_server(ranks: int, port: int, inherit: Sequence[int]) -> _RankProcesses:
    ours, theirs = zip(*(Pipe() for _ in range(1 + ranks)), strict=True)
    descriptors = [pipe.fileno() for pipe in theirs]
    script = str(Path(__file__).with_name("fork_server.py"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the fork server handles it
    try:
        server = subprocess.Popen(
            [sys.executable, "-P", script, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=[*descriptors, *inherit],
            env=build_rank_environment(os.environ, ranks, port),
        )
    except OSError as error:
        raise RunFailed(f"{ranks} ranks could not be started: {error}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for pipe in theirs:
            pipe.close()
    control, *pipes = ours
    return _RankProcesses(server, control, [_RankProcess(number, pipe) for number, pipe in enumerate(pipes)])


def build_rank_environment(inherited: Mapping[str, str], ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set, except for the rank itself.

    OMP_NUM_THREADS becomes a fair share of the cores; gloo is bound to the loopback, or it would look up this host.
    """
    environ = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if "lo" in (name for _, name in socket.if_nameindex()):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR=LOCALHOST, MASTER_PORT=str(port))
    environ[LAUNCHER_VARIABLE] = "paceline"
    return environ
