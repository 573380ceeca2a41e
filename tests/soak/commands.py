"""`paceline` as a user starts it, and the same from a process that has imported torch already.

Importing torch takes seconds of each command, and of the process that its ranks come from. Started here, a command is
a fork of a process that has all of it in memory, and the process of its ranks is a fork of the command: the same
processes as ever, each the child of the same one, with the code, the pipes and the signals that they have anyway.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "src"
CLOCK = HERE / "jumping_clock"
MODULES = (
    *(
        "paceline.cli.main",
        "paceline.api",
        "paceline.launch.local",
        "paceline.launch.process_group",
        "paceline.trainer.setup",
    ),
    *("paceline.workloads.classifier.workload", "paceline.workloads.lm.workload", "paceline.parallel.fsdp"),
    *("paceline.workloads.topics.workload", "paceline.workloads.topics.counts.numba_kernels"),
    *("paceline.runlog.loggers", "paceline.runlog.machine", "torch._dynamo", "torch.distributed.checkpoint"),
)


@dataclass
class Command:
    """A command that runs, and all processes that it started."""

    process: Any
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def tree(self) -> list[psutil.Process]:
        """The command itself, and then what it started."""
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            found = [top, *top.children(recursive=True)]
            self.seen.update({one.pid: one for one in found})
            return found
        return []

    def alive(self) -> list[int]:
        """Its processes that have not ended."""
        found = []
        for pid, one in self.seen.items():
            with suppress(psutil.Error):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def kill(self) -> None:
        """All that is left of it."""
        self.tree()
        for pid in self.alive():
            with suppress(psutil.Error):
                self.seen[pid].kill()


def typed(words: list[str], folder: Path, log: Path, jumps: str = "") -> Command:
    """As a user starts it, from the first byte of Python on."""
    path = [*([str(CLOCK)] if jumps else []), str(SOURCES)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CLOCK_JUMPS": jumps or "0 0"}
    with log.open("ab") as out:
        command = [sys.executable, "-m", "paceline", *words]
        return Command(subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environ))


def warm(words: list[str], folder: Path, log: Path, jumps: str = "") -> Command:
    """The same without the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*MODULES])
    process = context.Process(target=_be_the_command, args=(words, folder, log, jumps))
    process.start()
    return Command(process)


def _be_the_command(words: list[str], folder: Path, log: Path, jumps: str) -> None:
    from paceline.cli import main
    from paceline.launch import local

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    if jumps:
        os.environ["CLOCK_JUMPS"] = jumps
        runpy.run_path(str(CLOCK / "sitecustomize.py"))
    local.subprocess = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL)
    sys.argv = ["paceline", *words]
    main.main(words)


class Fork:
    """The process that ranks come from, without a new Python: what the launcher needs of a `Popen`."""

    def __init__(self, command: list[str], *, stdin: int, pass_fds: list[int], env: dict[str, str]) -> None:
        assert Path(command[2]).name == "fork_server.py"
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = _be_the_fork_server(pass_fds, env)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int | None:
        return self._ended(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _be_the_fork_server(pipes: list[int], environ: dict[str, str]) -> int:
    """What `exec` does to handlers and descriptors, and then its own code."""
    from paceline.launch import fork_server

    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in pipes:
            with suppress(OSError):
                os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    control, *ends = map(Connection, pipes)
    code = fork_server.serve_forks(control, ends)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code
