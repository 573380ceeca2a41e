"""Start the ranks of one machine, wait for them, and say in one message what went wrong if something did.

The ranks are forks of a new Python process (`fork_server.py`) that imports what they need and nothing of the script or
notebook that called us, so a script needs no `if __name__ == "__main__"`. The launcher itself never imports torch.

    a rank fails       its peers get GRACE_S to end by themselves, then they are killed; the cause is raised
    SIGTERM, Ctrl-C    passed on to all ranks, once; they save and return, and so does `run_ranks`
    second Ctrl-C      the ranks are killed at once
    launcher killed    the ranks notice by themselves and stop as after SIGTERM
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.errors import RunFailed, UserError
from paceline.io.terminal import warn
from paceline.launch import root_cause
from paceline.launch.environment import LAUNCHER_VARIABLE, LOCALHOST
from paceline.launch.hang_diagnosis import ProcessMonitor
from paceline.launch.heartbeat import STOPPED, read_process_state
from paceline.launch.signals import STOP_SIGNALS, StopRequest

T = TypeVar("T")

POLL_S = 0.05
GRACE_S = 3.0  # for the peers of a failed rank: enough to notice and to say so
EXIT_TIMEOUT_S = 60.0  # for ranks that have all handed in their results and only have to leave
FORK_SERVER_RANK = -1  # among the ranks, the process that they come from
FORK_SERVER_NAME = "the process that starts the ranks"
PRELOAD = ("paceline.launch.process_group",)  # torch, in other words


def run_ranks(
    worker: Callable[..., T],
    args: tuple[object, ...],
    ranks: int,
    preload: Sequence[str] = PRELOAD,
    watch: ProcessMonitor | None = None,
) -> list[T]:
    """Call `worker(*args)` in `ranks` new processes and return what they return, in the order of the ranks.

    The worker finds its place in the variables that torchrun sets (RANK, WORLD_SIZE, …); `environment.detect` reads
    them. It must be importable by name, and its arguments and result picklable. The modules in `preload` are imported
    once for all ranks; they must not touch a GPU at import. `watch` knows how long a process may be stopped.
    """
    work = _pickle_work(worker, args, preload)
    with StopRequest() as stop, _start_ranks(ranks, work) as processes:
        processes.watch = watch
        supervise_ranks(processes, stop)
        failures = processes.failures()
        if not failures:
            return [rank.result[0] for rank in processes.ranks]
        if stop.insisted:
            raise RunFailed("killed by the second Ctrl-C")
        first = root_cause.find_root_cause(failures)
        if stop.requested and first.signal in STOP_SIGNALS:
            raise RunFailed(f"stopped by {stop.signal_name} before the ranks were ready to stop by themselves")
        raise root_cause.to_error(first)


@dataclass
class _RankProcess:
    number: int
    pipe: Connection
    pid: int | None = None
    ended: bool = False
    killed: bool = False  # by us
    result: list[Any] = field(default_factory=list)
    failure: root_cause.RankFailure | None = None

    def listen(self) -> None:
        """Take the outcome, if it has come."""
        outcome = _receive(self.pipe)
        if isinstance(outcome, root_cause.RankFailure):
            self.failure = self.failure or outcome  # what we saw of it ourselves came first
        elif outcome is not None:
            self.result = [outcome[0]]

    def end(self, code: int, time_s: float) -> None:
        self.ended = True
        self.listen()
        if not self.result and self.failure is None:
            self.failure = root_cause.describe_exit(self.number, code, time_s, echo=self.killed)

    def signal(self, number: signal.Signals) -> None:
        if self.pid is not None and not self.ended:
            self.killed = self.killed or number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class _RankProcesses:
    """The process that the ranks come from, and the ranks."""

    server: subprocess.Popen[bytes]
    control: Connection
    ranks: list[_RankProcess]
    server_failure: root_cause.RankFailure | None = None
    told_to_stop: bool = False
    watch: ProcessMonitor | None = None

    @property
    def over(self) -> bool:
        return self.server_failure is not None or all(rank.ended for rank in self.ranks)

    @property
    def leaving(self) -> bool:
        return all(rank.result for rank in self.ranks)

    def failures(self) -> list[root_cause.RankFailure]:
        known = [rank.failure for rank in self.ranks if rank.failure is not None]
        return known + ([self.server_failure] if self.server_failure is not None else [])

    def listen(self) -> None:
        """Wait a moment for news: outcomes from the ranks, process ids and ends from the server."""
        wait([self.control, *(rank.pipe for rank in self.ranks if not rank.pipe.closed)], POLL_S)
        for rank in self.ranks:
            rank.listen()
        while not self.over and (news := _receive(self.control)) is not None:
            match news:
                case root_cause.RankFailure():
                    self.server_failure = news
                case list(pids):
                    for rank, pid in zip(self.ranks, pids, strict=True):
                        rank.pid = pid
                case (number, code, time_s):
                    self.ranks[number].end(code, time_s)
        self._look_for_stopped()
        if self.control.closed and not self.over:
            code = self.server.wait()
            if self.leaving:  # nobody will say that they have ended
                self.signal(signal.SIGKILL)
                self.ranks = [replace(rank, ended=True) for rank in self.ranks]
            else:
                self.server_failure = root_cause.describe_exit(FORK_SERVER_NAME, code, time.time(), echo=False)

    def _look_for_stopped(self) -> None:
        """A process that somebody stopped and nobody continued: the run ends for it, if its work is not done."""
        pids = {rank.number: rank.pid for rank in self.ranks if rank.pid is not None and not rank.ended}
        if self.watch is None:
            return
        if failures := self.failures():
            if read_process_state(self.server.pid)[0] == STOPPED:  # ranks that it did not start were waited for
                self._give_up_server()
            elif all(failure.echo for failure in failures):  # it may have been stopped before it could be heard
                for number in [number for number, pid in pids.items() if read_process_state(pid)[0] == STOPPED]:
                    self._blame_stopped(number, pids[number])
            else:
                self._look_behind(failures)
            return
        for number in self.watch.stopped({**pids, FORK_SERVER_RANK: self.server.pid}):
            if number == FORK_SERVER_RANK:
                self._give_up_server()
            elif self.ranks[number].result:
                self.ranks[number].signal(signal.SIGKILL)
            else:
                self._blame_stopped(number, pids[number])

    def _blame_stopped(self, number: int, pid: int) -> None:
        if self.watch is not None and self.ranks[number].failure is None:
            self.ranks[number].failure = root_cause.describe_exception(number, self.watch.why(number, pid))

    def _give_up_server(self) -> None:
        self.server.kill()
        if not self.leaving:
            said = (
                f"{FORK_SERVER_NAME} (pid {self.server.pid}) was stopped by a signal such as SIGSTOP, and did not go on"
            )
            self.server_failure = root_cause.RankFailure(0, "died", said, "", time.time(), echo=False)

    def _look_behind(self, failures: list[root_cause.RankFailure]) -> None:
        """The rank that another one waited for until it was aborted: that one is the cause."""
        if self.watch is None or len(failures) > 1 or failures[0].signal != signal.SIGABRT:
            return
        if (silent := self.watch.waited_for(failures[0].rank)) is not None:
            self.ranks[failures[0].rank].failure = replace(failures[0], echo=True)
            self.ranks[silent.rank].failure = root_cause.describe_exception(silent.rank, silent)

    def forward_signal(self, received: signal.Signals) -> None:
        """Whatever came means the same, and the second of two means nothing new."""
        if self.stop_sent:
            return
        self.stop_sent = True
        hint = " (Ctrl-C again kills them)" if received == signal.SIGINT else ""
        warn(f"{received.name}: the ranks stop when they have saved{hint}")
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        if all(rank.pid is None for rank in self.ranks) and self.server.poll() is None:
            self.server.send_signal(number)  # still importing
        for rank in self.ranks:
            rank.signal(number)


def _receive(pipe: Connection) -> Any:
    """The next message; None when there is none now. A pipe whose other end is gone is closed."""
    try:
        return pickle.loads(pipe.recv_bytes()) if not pipe.closed and pipe.poll() else None
    except (EOFError, OSError):
        pipe.close()
        return None


class RankGroup(Protocol):
    """Processes that were started together, as the one who looks after them sees them."""

    @property
    def over(self) -> bool: ...

    @property
    def leaving(self) -> bool:
        """All have done their work and only have to end."""
        ...

    def failures(self) -> list[root_cause.RankFailure]: ...

    def listen(self) -> None:
        """Wait a moment for news."""
        ...

    def forward_signal(self, received: signal.Signals) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...


def supervise_ranks(processes: RankGroup, stop: StopRequest) -> None:
    """Until every rank has ended: listen, pass on requests to stop, and end the peers of a rank that failed."""
    passed_on = 0
    deadline_s: float | None = None
    while not processes.over:
        processes.listen()
        for number in stop.received[passed_on:]:
            passed_on += 1
            processes.forward_signal(number)
        if deadline_s is None:
            if processes.failures():
                deadline_s = time.monotonic() + GRACE_S
            elif processes.leaving:
                deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        if stop.insisted or (deadline_s is not None and time.monotonic() > deadline_s):
            processes.signal(signal.SIGKILL)


class _Packer(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if getattr(thing, "__module__", None) == "__main__" and hasattr(thing, "__qualname__"):
            raise UserError(
                f"{thing.__qualname__} is defined in the script or notebook that is running; ranks are new processes "
                "and cannot see it: move it to a module and import it from there"
            )
        return NotImplemented


def _pickle_work(worker: Callable[..., object], args: tuple[object, ...], preload: Sequence[str]) -> bytes:
    work = io.BytesIO()
    _Packer(work).dump((worker, args))
    return pickle.dumps((sys.path, tuple(preload), work.getvalue()))


@contextlib.contextmanager
def _start_ranks(ranks: int, work: bytes) -> Iterator[_RankProcesses]:
    with reserve_port() as port:
        processes = _start_fork_server(ranks, port)
        try:
            with contextlib.suppress(OSError):  # dead already; `listen` will say how
                processes.control.send_bytes(work)
            yield processes
        finally:
            processes.signal(signal.SIGKILL)
            if not processes.over:
                processes.server.kill()
            processes.server.wait()
            for pipe in (processes.control, *(rank.pipe for rank in processes.ranks)):
                pipe.close()


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """A free port that stays ours until rank 0 listens on it: bound here too, but without listening."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOCALHOST, 0))
        yield reserved.getsockname()[1]


def _start_fork_server(ranks: int, port: int) -> _RankProcesses:
    ours, theirs = zip(*(Pipe() for _ in range(1 + ranks)), strict=True)
    descriptors = [pipe.fileno() for pipe in theirs]
    script = str(Path(__file__).with_name("fork_server.py"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the new process is ready for it
    try:
        server = subprocess.Popen(
            [sys.executable, "-P", script, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
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
    """What torchrun would set, but for the number of a rank; a fair share of the cores for the libraries that read
    OMP_NUM_THREADS; and the loopback for gloo, which would otherwise look for the machine's name in the network."""
    environ = {name: value for name, value in inherited.items() if not name.startswith("TORCHELASTIC_")}
    cores = len(os.sched_getaffinity(0))
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    if "lo" in (name for _, name in socket.if_nameindex()):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR=LOCALHOST, MASTER_PORT=str(port))
    environ[LAUNCHER_VARIABLE] = "paceline"
    return environ
