"""A process that has imported torch and stays, for tests of what ranks compute and not of how they are started.

`paceline.launch.fork_server` imports torch and then forks the ranks. The import takes two seconds of one core, and the
tests start ranks more than a hundred times. Here it is done once: every launch is a fork of this process, in which its
own code goes on as it would in a new one, with the same pipes, environment, folder and standard streams. The launcher
does not notice: what it gets in place of a `Popen` has the same methods.
"""

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

MODULES = (
    *("paceline.launch.process_group", "paceline.trainer.setup", "paceline.workloads.lm.workload"),
    *("paceline.workloads.classifier.workload", "paceline.workloads.unet.workload"),
    *("paceline.parallel.pipeline", "paceline.parallel.tensor"),
    *("paceline.parallel.fsdp", "paceline.parallel.compress"),
    *("paceline.runlog.loggers", "paceline.runlog.machine", "paceline.runlog.summary"),
    *("paceline.workloads.topics.workload", "paceline.workloads.topics.counts.numba_kernels"),
    *("paceline.workloads.transformers.workload", "transformers.models.llama.modeling_llama"),
    "paceline.workloads.keras.model",
    *("paceline.workloads.trees.workload", "paceline.workloads.trees.xgboost_rounds"),
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.profiler"),
)
MOST_DESCRIPTORS = 64
MOST_BYTES = 1 << 20


class Nursery:
    """The other end, in the process of the tests. One launch at a time."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.ours, theirs):
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, buffer, 2 * MOST_BYTES)
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environ)
        theirs.close()

    def start(self, command: list[str], *, stdin: int, pass_fds: list[int], env: dict[str, str]) -> "Child":
        """In place of `subprocess.Popen` of the fork server."""
        assert Path(command[2]).name == "fork_server.py"
        pipes = len(command) - 3  # what follows them, such as a lock, is only kept open
        assert command[3:] == [str(descriptor) for descriptor in pass_fds[:pipes]]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        socket.send_fds(self.ours, [pickle.dumps((env, os.getcwd(), pipes))], [1, 2, *pass_fds])
        return Child(int(self.ours.recv(64)), self.ours)

    def close(self) -> None:
        self.ours.close()
        self.process.wait()


class Child:
    def __init__(self, pid: int, ends: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ends = ends

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            return self._listen(socket.MSG_DONTWAIT)
        return None

    def wait(self) -> int:
        return self._listen(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _listen(self, flags: int) -> int:
        if self.returncode is None:
            self.returncode = int(self._ends.recv(64, flags))
        return self.returncode


def main(tests: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for module in MODULES:
        importlib.import_module(module)
    while True:
        request, descriptors, _, _ = socket.recv_fds(tests, MOST_BYTES, MOST_DESCRIPTORS)
        if not request:  # the tests are over
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, as in the fork server
            pid = os.fork()
        if pid == 0:
            tests.close()
            code = 1
            try:
                code = _be_the_seed(*pickle.loads(request), descriptors)
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
        tests.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        tests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be_the_seed(environ: dict[str, str], folder: str, pipes: int, descriptors: list[int]) -> Any:
    from multiprocessing.connection import Connection

    from paceline.launch import fork_server

    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    out, err, *others = descriptors
    for ours, theirs in ((1, out), (2, err)):
        os.dup2(theirs, ours)
        os.close(theirs)
    control, *ends = (Connection(pipe) for pipe in others[:pipes])
    code = fork_server.serve_forks(control, ends)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
