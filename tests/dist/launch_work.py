"""What the ranks of test_launch.py do."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from paceline.errors import RunFailed, UserError
from paceline.launch.environment import detect_rank
from paceline.launch.signals import StopRequest

LONG_S = 300.0  # what a rank would wait or work if nobody ended it; no test waits for that


def import_torch():
    """In a rank alone: the launchers that are tested do without."""
    import torch

    from paceline.launch.process_group import join_ranks

    return torch, torch.distributed, join_ranks


def introduce():
    torch, dist, join_ranks = import_torch()
    place = detect_rank(os.environ)
    with join_ranks(place, "cpu", 0, LONG_S) as device:
        total = torch.tensor([float(place.rank + 1)])
        dist.all_reduce(total)
        assert dist.get_backend() == "gloo"
    assert not dist.is_initialized()
    return place.rank, place.world, place.launcher, device.type, total.item()


def fail(how, after_joining=True):
    torch, dist, join_ranks = import_torch()
    place = detect_rank(os.environ)
    with join_ranks(place, "cpu", 1, LONG_S) if after_joining else contextlib.nullcontext(), StopRequest():
        for step in range(int(LONG_S / 0.01)):
            if after_joining:
                dist.all_reduce(torch.ones(1000))
            if step == 3 and place.rank == 1:
                FAILURES[how]()
            time.sleep(0.01)


def raise_(error):
    raise error


FAILURES = {
    "bug": lambda: raise_(KeyError("no such step")),
    "user": lambda: raise_(UserError("data.path: is empty; type  data.path=FILE")),
    "run": lambda: raise_(RunFailed("the loss is not finite at step 3")),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def fail_while_a_peer_is_stuck():
    torch, dist, join_ranks = import_torch()
    place = detect_rank(os.environ)
    with StopRequest(), join_ranks(place, "cpu", 1, LONG_S):
        dist.barrier()
        if place.rank == 0:
            time.sleep(LONG_S)
        dist.all_reduce(torch.ones(10), async_op=True)
        raise ValueError("with a collective in flight")


def speak(lines):
    for line in range(lines):
        print(f"rank {os.environ['RANK']} line {line} on stdout")
        print(f"rank {os.environ['RANK']} line {line} on stderr", file=sys.stderr)


def work_until_stopped(folder, saving_s):
    torch, dist, join_ranks = import_torch()
    place = detect_rank(os.environ)
    with StopRequest() as stop, join_ranks(place, "cpu", 1, LONG_S):
        (Path(folder) / f"pid{place.rank}").write_text(str(os.getpid()))
        wanted = torch.zeros(1)
        while not wanted:
            time.sleep(0.02)
            wanted = torch.tensor([float(stop.requested)])
            dist.all_reduce(wanted, dist.ReduceOp.MAX)
        time.sleep(saving_s)
        (Path(folder) / f"saved{place.rank}").touch()
    return place.rank


def stop_the_server(then=""):
    place = detect_rank(os.environ)
    if place.rank == place.world - 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        if then:
            raise RuntimeError(then)
    return place.rank
