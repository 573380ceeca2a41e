"""What a hanging process leaves for diagnosis: Python stacks, and its last collectives.

The file of a rank lies in the run folder. A data worker is a fork from before that is known: it keeps room for its
stack in memory without a name in any folder, where another process of the same user on its machine reads it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import walk_stack
from typing import Any

from paceline.errors import UserError
from paceline.io.files import from_flat, read_json
from paceline.io.safe_open import open_regular

STACK_SIGNAL = signal.SIGUSR2
PACKAGE = str(Path(__file__).parents[1])
MEMFD_NAME = "paceline-stack"
ANSWER_TIMEOUT_S = 0.5
MAX_STACK_BYTES = 1 << 18


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
        with open_regular(file) as stream:
            text = stream.read(MAX_STACK_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    found: dict[str, Stack] = {}
    for part in re.split(r"^(?:Current thread|Thread|Stack) ", text, flags=re.MULTILINE)[1:]:
        thread = part.split(maxsplit=1)[0]
        if thread in found:
            break
        found[thread] = tuple(_parse_frames(part))
    return [stack for stack in reversed(found.values()) if stack]


def _parse_frames(text: str) -> Iterator[Frame]:
    for found in re.finditer(r'^  File "(.*)", line (\d+) in (.*)$', text, re.MULTILINE):
        yield Frame(found[1], int(found[2]), found[3])


def dump_own_stacks() -> str:
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


def enable_stack_dump(file: int | None = None) -> bool:
    """From now on its main thread writes its stack when it gets SIGUSR2, unless that means something else to it."""
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return False
    with suppress(OSError, AttributeError):  # a kernel without such memory
        room = os.memfd_create(MEMFD_NAME) if file is None else file
        faulthandler.register(
            STACK_SIGNAL, room, all_threads=False
        )  # the frames of others may just be left: it would crash
        return True
    return False


def disable_stack_dump() -> None:
    faulthandler.unregister(STACK_SIGNAL)


def request_stack(pid: int) -> None:
    """Its main thread is asked, where the system can name one: when a process that was stopped goes on, that thread
    answers before it takes another step, while other threads may answer after it has."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, pid, STACK_SIGNAL):
        os.kill(pid, STACK_SIGNAL)


def fetch_stacks(pid: int) -> list[Stack]:
    """The stacks of a process that gives them; nothing of any other, to which the signal would be the end."""
    room = _find_memfd(pid)
    if room is None:
        return []
    with suppress(OSError):
        request_stack(pid)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline and not read_stacks(room):
            time.sleep(0.01)
        time.sleep(0.01)  # for the rest of it
        return read_stacks(room)
    return []


def _find_memfd(pid: int) -> Path | None:
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(file).startswith(f"/memfd:{MEMFD_NAME}"):
                    return file
    return None


def list_children(pid: int) -> list[int]:
    """The processes that a process has started."""
    import psutil

    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


BUFFER_VARIABLE, OLD_BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""How many calls are kept: the variable, and its older name."""
BUFFER_CALLS = "2000"
RECORDER_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Of NCCL, and of the other backends."""


@dataclass(frozen=True)
class CollectiveCall:
    """The last collective of a group that a rank has called."""

    group: str
    """The backend and torch's name for it."""
    number: int
    """How many it has called by then."""
    name: str
    done: bool

    def __str__(self) -> str:
        return f"{self.name}, number {self.number} of group {self.group}"


Calls = Mapping[str, CollectiveCall]
"""By group."""


def enable_flight_recorder(environ: MutableMapping[str, str]) -> None:
    """Before ranks join; what the user has set stays."""
    if OLD_BUFFER_VARIABLE not in environ:
        environ.setdefault(BUFFER_VARIABLE, BUFFER_CALLS)


def dump_own_calls() -> str:
    """The last call of this process in each group, for `read_calls`; nothing where none are kept."""
    found: dict[str, CollectiveCall] = {}
    for entry in _read_recorder():
        call = _parse_call(entry)
        if call is not None and (call.group not in found or call.number > found[call.group].number):
            found[call.group] = call
    return json.dumps({group: asdict(call) for group, call in found.items()}) if found else ""


def _read_recorder() -> Iterator[Any]:
    torch: Any = sys.modules.get("torch")
    for name in RECORDER_DUMPS if torch is not None and torch.distributed.is_available() else ():
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            with suppress(RuntimeError, ValueError, AttributeError):
                yield from json.loads(dump()).get("entries", ())


def _parse_call(entry: Any) -> CollectiveCall | None:
    """None for what lies between two ranks alone, and for what another version of torch writes."""
    with suppress(KeyError, TypeError, IndexError, ValueError, AttributeError):
        if not entry["is_p2p"]:
            backend, _, name = entry["profiling_name"].partition(":")
            group = f"{backend} {entry['process_group'][0]}"  # the backends of a group count by themselves
            done = entry["retired"] or entry["state"] == "completed"
            return CollectiveCall(group, int(entry["collective_seq_id"]), name, bool(done))
    return None


def calls_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.collectives"


def read_calls(folder: Path, rank: int) -> Calls:
    """What a rank has left; nothing where it left none, or somebody else wrote the file."""
    with suppress(UserError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return {
            group: from_flat(CollectiveCall, values) for group, values in read_json(calls_file(folder, rank)).items()
        }
    return {}


def find_pending_call(calls: Calls) -> CollectiveCall | None:
    """The one that a rank waits in, if it does."""
    return next((call for call in calls.values() if not call.done), None)


def count_calls(calls: Calls) -> int:
    """How many there were, of all groups."""
    return sum(call.number for call in calls.values())
