"""Heartbeats: what each rank is doing, in files of the run folder that are overwritten in place.

    heartbeats/rank0.json          one line: step, phase, time, host, process
    heartbeats/rank0.stack         its Python stacks, once it was silent for half of the timeout of a collective
    heartbeats/rank0.collectives   its last collectives at that time, if torch records them
    heartbeats/rank0.asked         the stack of its main thread, when another process asked for it

The stack is written by a thread, so that a rank that hangs in a collective or in the user's code leaves it too.
"""

import faulthandler
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import UserError
from paceline.io.files import from_flat, read_json
from paceline.launch import hang_traces
from paceline.launch.environment import RankInfo

Phase = Literal["start", "data", "step", "evaluation", "checkpoint", "end", "failed"]
PHASES_AFTER_STEP: tuple[Phase, ...] = ("failed", "evaluation", "checkpoint", "data", "step")
LINE_BYTES = 384
KINDS = ("json", "stack", "asked", "collectives")
SILENT_SHARE = 0.5  # of the timeout of a collective: after so much silence a rank writes its stack
STOPPED = "T"


@dataclass(frozen=True)
class Beat:
    rank: int
    host: str
    pid: int
    born: int  # start time of its process in the kernel's count, since process ids are reused
    step: int
    phase: Phase
    t: float
    busy_s: float = 0.0  # of a step, without waiting for other ranks

    @property
    def position(self) -> tuple[int, int, int]:
        """Sort key of progress: the rank with the smaller position is behind."""
        part = 0 if self.phase == "start" else 2 if self.phase == "end" else 1
        return part, self.step, PHASES_AFTER_STEP.index(self.phase) if part == 1 else 0

    @property
    def description(self) -> str:
        return {
            "start": "before its first step",
            "data": f"waiting for the samples of step {self.step + 1}",
            "step": f"in step {self.step + 1}",
            "evaluation": f"in the evaluation after step {self.step}",
            "checkpoint": f"in the checkpoint of step {self.step}",
            "end": f"at the end, after step {self.step}",
            "failed": f"after step {self.step}",
        }[self.phase]

    @property
    def state(self) -> str:
        """State of its process in Linux (R, S, D, T, …); "" if it is gone or on another machine."""
        if self.host != socket.gethostname():
            return ""
        state, born = read_process_state(self.pid)
        return state if born == self.born else ""


class Heartbeat:
    """Write the heartbeats of this rank. A beat takes microseconds; one that cannot be written is skipped."""

    def __init__(self, folder: Path, rank_info: RankInfo, timeout_s: float) -> None:
        self._files: dict[str, int] = {}
        self._beaten_s, self._closed = time.monotonic(), threading.Event()
        self._watcher: threading.Thread | None = None
        self._folder, self._rank, several = folder, rank_info.rank, rank_info.world > 1
        self._patience_s = SILENT_SHARE * timeout_s
        _, born = read_process_state(os.getpid())
        host = json.dumps(socket.gethostname()[:64])
        self._identity = f'"rank": {self._rank}, "host": {host}, "pid": {os.getpid()}, "born": {born}'
        self._phase: Phase = "start"
        self._step, self._busy_s = 0, 0.0
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            for kind in KINDS:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (kind != "json" and os.O_APPEND | os.O_TRUNC)
                self._files[kind] = os.open(folder / f"rank{self._rank}.{kind}", flags, 0o644)
        self._dumps_stack = several and self._complete and hang_traces.enable_stack_dump(self._files["asked"])
        self("start", 0)
        if several and self._complete:
            self._watcher = threading.Thread(target=self._watch, name="paceline-heartbeat", daemon=True)
            self._watcher.start()

    @property
    def _complete(self) -> bool:
        return len(self._files) == len(KINDS)

    def _watch(self) -> None:
        """Write the stacks of this process after a long silence, and delete them when it continues.

        The timer of faulthandler could read frames that are just being left, and crash.
        """
        silent_since_s = 0.0
        while not self._closed.wait(self._patience_s / 10):
            beaten_s = self._beaten_s
            with suppress(OSError):
                if silent_since_s and beaten_s != silent_since_s and self._phase != "failed":
                    for kind in ("stack", "collectives"):
                        os.ftruncate(self._files[kind], 0)
                    silent_since_s = 0.0
                elif not silent_since_s and time.monotonic() - beaten_s > self._patience_s:
                    silent_since_s = beaten_s
                    faulthandler.dump_traceback(self._files["stack"])
                    os.write(self._files["collectives"], hang_traces.dump_own_calls().encode(errors="replace"))

    def __call__(self, phase: Phase | None, step: int | None, busy_s: float | None = None) -> None:
        """Record phase, completed steps and the time of a step; None keeps the last value."""
        self._phase = phase = self._phase if phase is None else phase
        self._step = step = self._step if step is None else step
        self._busy_s = self._busy_s if busy_s is None else busy_s
        self._beaten_s = time.monotonic()
        if not self._complete:
            return
        now = f'"step": {step}, "phase": "{phase}", "t": {time.time():.3f}, "busy_s": {self._busy_s:.6f}'
        with suppress(OSError):
            os.pwrite(self._files["json"], f"{{{now}, {self._identity}}}".encode().ljust(LINE_BYTES - 1) + b"\n", 0)

    def remove(self) -> None:
        """Delete the files of this rank; the last rank deletes the folder."""
        with suppress(OSError):
            for kind in KINDS:
                (self._folder / f"rank{self._rank}.{kind}").unlink(missing_ok=True)
            self._folder.rmdir()

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self("failed", None)
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._dumps_stack:
            faulthandler.unregister(hang_traces.STACK_SIGNAL)
        while self._files:
            os.close(self._files.popitem()[1])


def read_beats(folder: Path) -> list[Beat]:
    """Return the heartbeats in a folder by rank, without those that a killed rank left unfinished."""
    found = []
    for file in folder.glob("rank*.json"):
        with suppress(UserError, TypeError, ValueError, OSError):
            found.append(from_flat(Beat, read_json(file)))
    return sorted(found, key=lambda beat: beat.rank)


def read_process_state(pid: int) -> tuple[str, int]:
    """Return (state, start time) of a process; ("", 0) if it does not exist, or there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0
