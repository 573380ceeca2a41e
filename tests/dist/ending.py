"""Waiting for what processes do and for their end; what is waited for decides, and time only when all is lost."""

import os
import time
from pathlib import Path

import psutil

TOO_LONG_S = 120.0


def wait_until(condition, process=None, look_every_s=0.02):
    """True once the condition holds; False if the process ends before."""
    deadline = time.monotonic() + TOO_LONG_S
    while not condition():
        if process is not None and process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(look_every_s)
    return True


def wait_until_gone(group):
    wait_until(lambda: not any(group_of(p.pid) == group and _lives(p) for p in psutil.process_iter()))


def group_of(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return False
