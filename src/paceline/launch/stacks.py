"""Python stacks of processes that hang: of all threads by one of them, or of the main one when they get SIGUSR2.

The file of a rank lies in the run folder. A data worker is a fork from before that is known: it keeps room for its
stack in memory without a name in any folder, where another process of the same user on its machine reads it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack

from paceline.plain_files import open_plain

ASKING = signal.SIGUSR2
PACKAGE = str(Path(__file__).parents[1])
ROOM = "paceline-stack"
ANSWER_S = 0.5
MOST_BYTES = 1 << 18


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'

    @property
    def library(self) -> bool:
        """Whether the file is of the interpreter or of an installed package, and not ours or the user's."""
        if self.file.startswith(PACKAGE):
            return False
        return "/site-packages/" in self.file or "/lib/python" in self.file or self.file.startswith("<")


Stack = tuple[Frame, ...]
"""The newest call first."""


def stack_file(folder: Path, rank: int, asked: bool = False) -> Path:
    """Where a rank writes its stack: by itself when it is silent for long, or when it is asked."""
    return folder / f"rank{rank}.{'asked' if asked else 'stack'}"


def read_stacks(file: Path) -> list[Stack]:
    """Those of the threads of a process, the main one first; nothing where nothing was written.

    There may be more than one writing, and the process may have gone on after the first, which is what counts.
    """
    try:
        with open_plain(file) as stream:
            text = stream.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    found: dict[str, Stack] = {}
    for part in re.split(r"^(?:Current thread|Thread|Stack) ", text, flags=re.MULTILINE)[1:]:
        thread = part.split(maxsplit=1)[0]
        if thread in found:
            break
        found[thread] = tuple(_frames(part))
    return [stack for stack in reversed(found.values()) if stack]


def _frames(text: str) -> Iterator[Frame]:
    for found in re.finditer(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE):
        yield Frame(found[1], int(found[2]), found[3])


def own_stacks() -> str:
    """Those of the threads of this process but for the one that asks, in faulthandler's format, the main one last."""
    main, asking = threading.main_thread().ident, threading.get_ident()
    written = []
    for thread, newest in sorted(sys._current_frames().items(), key=lambda item: item[0] == main):
        if thread != asking:
            calls = (
                f'  File "{f.f_code.co_filename}", line {at} in {f.f_code.co_name}' for f, at in walk_stack(newest)
            )
            written.append("\n".join([f"Thread {thread:#x} (most recent call first):", *calls]))
    return "\n\n".join(written) + "\n"


def give_when_asked(file: int | None = None) -> bool:
    """From now on its main thread writes its stack when it gets SIGUSR2, unless that means something else to it."""
    if signal.getsignal(ASKING) != signal.SIG_DFL:
        return False
    with suppress(OSError, AttributeError):  # a kernel without such memory
        room = os.memfd_create(ROOM) if file is None else file
        faulthandler.register(ASKING, room, all_threads=False)  # the frames of others may just be left: it would crash
        return True
    return False


def give_no_more() -> None:
    faulthandler.unregister(ASKING)


def ask(pid: int) -> None:
    """Its main thread is asked, where the system can name one: when a process that was stopped goes on, that thread
    answers before it takes another step, while other threads may answer after it has."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, pid, ASKING):
        os.kill(pid, ASKING)


def asked_of(pid: int) -> list[Stack]:
    """The stacks of a process that gives them; nothing of any other, to which the signal would be the end."""
    room = _room(pid)
    if room is None:
        return []
    with suppress(OSError):
        ask(pid)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not read_stacks(room):
            time.sleep(0.01)
        time.sleep(0.01)  # for the rest of it
        return read_stacks(room)
    return []


def _room(pid: int) -> Path | None:
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(file).startswith(f"/memfd:{ROOM}"):
                    return file
    return None


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    import psutil

    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []
