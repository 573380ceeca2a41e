"""What each rank is at, in the run folder while it runs: written over in place, and read by whoever wonders.

    heartbeats/rank0.json          one line: step, phase, time, host, process
    heartbeats/rank0.stack         its Python stacks, if it was silent for half of the time that a collective may take
    heartbeats/rank0.collectives   its last collectives, then, where torch keeps them
    heartbeats/rank0.asked         the stack of its main thread, when another process asked for it

The stack is written by a thread, so that a rank which hangs in a collective or in the user's own code leaves it too.
Only one that does not run, or whose compiled code never lets the interpreter go on, cannot.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from paceline.errors import UserError
from paceline.io.files import from_flat, read_json
from paceline.launch.environment import RankInfo
from paceline.launch.hang_traces import (
    calls_file,
    disable_stack_dump,
    dump_own_calls,
    dump_own_stacks,
    enable_stack_dump,
    stack_file,
)

Phase = Literal["start", "data", "step", "evaluation", "checkpoint", "end", "failed"]
PHASES_AFTER_STEP: tuple[Phase, ...] = ("failed", "evaluation", "checkpoint", "data", "step")
LINE_BYTES = 384
HEARTBEAT_FILES = 4
SILENT_SHARE = 0.5
"""Of the time that a collective may take: then a rank leaves its stack, well before its peers give up."""
STOPPED = "T"
"""The state of a process that a signal has stopped, in Linux's word."""


@dataclass(frozen=True)
class Beat:
    """What a rank was at when it last said so."""

    rank: int
    host: str
    pid: int
    born: int
    """When its process began, in the kernel's count: another process may have its number later."""
    step: int
    """Steps that are done."""
    phase: Phase
    t: float
    busy_s: float = 0.0
    """How long it works on a step, where that was measured: all but waiting for others."""

    @property
    def position(self) -> tuple[int, int, int]:
        """Of two ranks, the one with the smaller position is behind."""
        part = 0 if self.phase == "start" else 2 if self.phase == "end" else 1
        return part, self.step, PHASES_AFTER_STEP.index(self.phase) if part == 1 else 0

    @property
    def place(self) -> str:
        """For people."""
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
        """Of its process, as Linux has it (R, S, D, T, …); empty where it is gone or on another machine."""
        if self.host != socket.gethostname():
            return ""
        state, born = read_process_state(self.pid)
        return state if born == self.born else ""


class Heartbeat:
    """Of this rank. A beat takes microseconds, and one that cannot be written is left out."""

    def __init__(self, folder: Path, place: RankInfo, timeout_s: float) -> None:
        self._files: list[int] = []
        self._paths: list[Path] = []
        self._beaten = time.monotonic()
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self._patience_s = SILENT_SHARE * timeout_s if place.world > 1 else 0.0
        _, born = read_process_state(os.getpid())
        host = json.dumps(socket.gethostname()[:64])
        self._who = f'"rank": {place.rank}, "host": {host}, "pid": {os.getpid()}, "born": {born}'
        self._phase: Phase = "start"
        self._step, self._busy_s = 0, 0.0
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            added = os.O_APPEND | os.O_TRUNC
            notes = *(stack_file(folder, place.rank, asked) for asked in (False, True)), calls_file(folder, place.rank)
            for file, flags in ((folder / f"rank{place.rank}.json", 0), *((note, added) for note in notes)):
                self._paths.append(file)
                self._files.append(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, 0o644))
        self._gives_stack = place.world > 1 and self._whole and enable_stack_dump(self._files[2])
        self("start", 0)
        if self._patience_s and self._whole:
            self._watcher = threading.Thread(target=self._watch, name="paceline-heartbeat", daemon=True)
            self._watcher.start()

    @property
    def _whole(self) -> bool:
        """Whether all of its files are open."""
        return len(self._files) == HEARTBEAT_FILES

    def _watch(self) -> None:
        """Write the stack of this process when it was silent for long, and take it away when it went on.

        In a thread of the interpreter: faulthandler's own could read frames that are just being left, and crash.
        """
        silent_since = 0.0
        while not self._over.wait(self._patience_s / 10):
            beaten = self._beaten
            with suppress(OSError):
                if silent_since and beaten != silent_since and self._phase != "failed":
                    for file in (self._files[1], self._files[3]):
                        os.ftruncate(file, 0)
                    silent_since = 0.0
                elif not silent_since and time.monotonic() - beaten > self._patience_s:
                    silent_since = beaten
                    os.write(self._files[1], dump_own_stacks().encode(errors="replace"))
                    os.write(self._files[3], dump_own_calls().encode(errors="replace"))

    def __call__(self, phase: Phase | None, step: int | None, busy_s: float | None = None) -> None:
        """Note what this rank is at, after so many steps, and how long it works on one; None is as before."""
        self._phase = phase = self._phase if phase is None else phase
        self._step = step = self._step if step is None else step
        self._busy_s = self._busy_s if busy_s is None else busy_s
        self._beaten = time.monotonic()
        if not self._whole:
            return
        now = f'"step": {step}, "phase": "{phase}", "t": {time.time():.3f}, "busy_s": {self._busy_s:.6f}'
        with suppress(OSError):
            os.pwrite(self._files[0], f"{{{now}, {self._who}}}".encode().ljust(LINE_BYTES - 1) + b"\n", 0)

    def remove(self) -> None:
        """The run has come to its end: nobody wonders any more where its ranks are."""
        with suppress(OSError):
            for path in self._paths:
                path.unlink(missing_ok=True)
            self._paths[0].parent.rmdir()  # by the last of them

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self("failed", None)
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._gives_stack:
            disable_stack_dump()
        for file in self._files:
            os.close(file)
        self._files = []


def read_beats(folder: Path) -> list[Beat]:
    """Of all ranks that have left one, by rank."""
    found = []
    for file in folder.glob("rank*.json"):
        with suppress(UserError, KeyError, TypeError, ValueError, OSError):
            beat = from_flat(Beat, read_json(file))
            if _is_valid(beat):
                found.append(beat)
    return sorted(found, key=lambda beat: beat.rank)


def _is_valid(beat: Beat) -> bool:
    """A rank may have been killed in the middle of a line, or somebody else wrote the file."""
    whole = all(isinstance(n, int) for n in (beat.rank, beat.pid, beat.born, beat.step))
    numbers = isinstance(beat.t, float) and isinstance(beat.busy_s, float)
    return whole and numbers and beat.phase in get_args(Phase) and isinstance(beat.host, str)


def read_process_state(pid: int) -> tuple[str, int]:
    """(its state, when it began); ("", 0) where there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0
