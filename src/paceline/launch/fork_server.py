"""Import once what all ranks need, then fork the ranks.

Importing torch takes more than a second of CPU; forks of a process that has imported it start at once and share its
memory. Nothing here touches a GPU before the fork, which CUDA would not survive.

The launcher holds the other end of one pipe to this process, for the work, and of one to each rank, for its outcome.
When the launcher dies the kernel closes them: so a rank learns that it is gone.

This file runs as a script, before the package can be imported: its top-level imports are the standard library alone.
"""

import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

ORPHAN_GRACE_S = 30.0


def serve_forks(launcher: Connection, pipes: list[Connection]) -> int:
    """Receive the work from the launcher, fork a rank for each pipe, and report how each ends."""
    faulthandler.enable()
    # Until the work handles signals there is nothing to save: Ctrl-C ends the process without a KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the launcher blocked it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or an inherited SIG_IGN would hide how ranks end
    sys.path[:], preload, work = pickle.loads(launcher.recv_bytes())
    try:
        for module in preload:
            importlib.import_module(module)
        worker, args = pickle.loads(work)
    except BaseException as error:
        launcher.send(_describe_failure(0, error))
        return 1

    from paceline.launch.signals import ignore_stop_signals

    gc.freeze()  # what is loaded now stays shared between the forks
    pids: dict[int, int] = {}
    for rank, pipe in enumerate(pipes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads
            pid = os.fork()
        if pid == 0:
            for other in (launcher, *pipes[:rank], *pipes[rank + 1 :]):
                other.close()
            _run_worker(rank, pipe, worker, args)
        pids[pid] = rank
    ignore_stop_signals()  # they are meant for the ranks; this process stays to report how those end
    for pipe in pipes:
        pipe.close()
    return _report_exits(launcher, pids)


def _report_exits(launcher: Connection, pids: dict[int, int]) -> int:
    with suppress(OSError):
        launcher.send(list(pids))
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid, None)
        if rank is not None:
            with suppress(OSError):
                launcher.send((rank, os.waitstatus_to_exitcode(status), time.time()))
    return 0


def _run_worker(rank: int, pipe: Connection, worker: Any, args: tuple[Any, ...]) -> NoReturn:
    from paceline.launch.signals import exit_immediately, exit_rank, ignore_stop_signals

    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines, also under PYTHONUNBUFFERED: ranks share a terminal
            stream.reconfigure(line_buffering=True, write_through=False)
    threading.Thread(target=_exit_with_launcher, args=(pipe,), daemon=True).start()
    code = 0
    try:
        outcome = pickle.dumps((worker(*args),))
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            exit_immediately(error.code or 0)
        outcome = pickle.dumps(_describe_failure(rank, error))
        code = 1
    ignore_stop_signals()
    with suppress(OSError):
        pipe.send_bytes(outcome)
    if code:
        exit_immediately(code)
    exit_rank(0)


def _describe_failure(rank: int, error: BaseException) -> Any:
    from paceline.launch.root_cause import describe_exception

    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # start at the work, not at this file
    return describe_exception(rank, error)


def _exit_with_launcher(pipe: Connection) -> None:
    with suppress(OSError, EOFError):
        pipe.recv_bytes()  # nothing is ever sent to a rank: this returns when the launcher is gone
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    control, *ends = (Connection(int(text)) for text in sys.argv[1:])
    sys.exit(serve_forks(control, ends))
