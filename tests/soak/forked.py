"""Start `paceline` as forks of this process, which has imported torch: a fraction of what new interpreters cost.

The processes are as real as others: of their own environment, folder, signals and streams, and with none of the
descriptors of this one but those that are passed on. Only the start of an interpreter and its imports are left out.
"""

import atexit
import faulthandler
import functools
import gc
import importlib
import io
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import paceline

PRELOAD = ("config", "data", "inference", "io", "launch", "parallel", "runlog", "trainer", "workloads")
"""Packages whose modules are imported once, with what those import."""


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that begins by calling a function with its arguments."""

    def __init__(self, call: Callable[[Sequence[str]], object], args: Sequence[str], **options: Any) -> None:
        self._call = call
        super().__init__(args, **options)

    # fmt: off
    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
    ) -> None:
        # fmt: on
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            self._run(list(args), (p2cread, c2pwrite, errwrite), {*pass_fds}, cwd, env)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _run(self, args: list[str], streams: Sequence[int], passed: set[int], cwd: Any, env: Any) -> NoReturn:
        code = 1
        try:
            _become_new(streams, passed)
            os.chdir(cwd or ".")
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            if os.environ.get("CLOCK_JUMPS", "0 0") != "0 0":
                runpy.run_path(os.environ["PYTHONPATH"].split(os.pathsep)[0] + "/sitecustomize.py")
            self._call(args)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            atexit._run_exitfuncs()
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)


def _become_new(streams: Sequence[int], passed: set[int]) -> None:
    """Forget what a program that is executed would not find."""
    gc.freeze()  # or what is collected would close descriptors of this process
    atexit._clear()
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for target, stream in enumerate(streams):
        if stream != -1:
            os.dup2(stream, target)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - passed - {0, 1, 2, nothing}:
        with suppress(OSError):  # not closed: Arrow ends a process in which its own pipe is closed already
            os.dup2(nothing, number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), write_through=True) for number in (1, 2))


def start_forked(args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `paceline ARGS`; its ranks are forks of forks."""
    _preload()
    return ForkedProcess(_run_paceline, args, **options)


@functools.cache
def _preload() -> None:
    for package in PRELOAD:
        for module in pkgutil.walk_packages([f"{paceline.__path__[0]}/{package}"], f"paceline.{package}."):
            with suppress(ImportError):  # of an optional library
                importlib.import_module(module.name)


def _run_paceline(args: Sequence[str]) -> None:
    from paceline.launch import local

    def start_server(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return ForkedProcess(_serve_forks, command[3:], **options)

    local.subprocess = types.SimpleNamespace(Popen=start_server, DEVNULL=subprocess.DEVNULL)
    sys.path.insert(0, os.getcwd())
    sys.argv = ["paceline", *args]
    runpy.run_module("paceline", run_name="__main__")


def _serve_forks(args: Sequence[str]) -> None:
    from paceline.launch.fork_server import serve_forks

    control, *ends = (Connection(int(text)) for text in args)
    sys.exit(serve_forks(control, ends))
