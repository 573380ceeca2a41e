"""What a hanging process leaves for diagnosis: Python stacks, and its last collectives.

A rank writes them to files of the run folder, a data worker to an anonymous memory file that is read through /proc.
On GPUs a collective runs after its call has returned, so only torch's flight recorder tells which rank called which.
"""

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import UserError
from paceline.io.files import from_flat, open_regular, read_json

STACK_SIGNAL = signal.SIGUSR2
PACKAGE = str(Path(__file__).parents[1])
MEMFD_NAME = "paceline-stack"
ANSWER_TIMEOUT_S = 0.5
MAX_STACK_BYTES = 1 << 18
BUFFER_VARIABLE, BUFFER_CALLS = "TORCH_FR_BUFFER_SIZE", "2000"  # how many calls the flight recorder keeps
RECORDER_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'

    @property
    def library(self) -> bool:
        """Return whether the file belongs to the interpreter or an installed package other than Paceline."""
        if self.file.startswith(PACKAGE):
            return False
        return "/site-packages/" in self.file or "/lib/python" in self.file or self.file.startswith("<")


TraceKind = Literal["stack", "asked", "collectives"]
Stack = tuple[Frame, ...]
"""The newest call first."""


def trace_file(folder: Path, rank: int, kind: TraceKind) -> Path:
    return folder / f"rank{rank}.{kind}"


def read_stacks(file: Path) -> list[Stack]:
    """Return the stacks of the threads of a process, the main one first.

    Of several dumps the first counts: the process may have continued after it.
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
        calls = re.finditer(r'^  File "(.*)", line (\d+) in (.*)$', part, re.MULTILINE)
        found[thread] = tuple(Frame(call[1], int(call[2]), call[3]) for call in calls)
    return [stack for stack in reversed(found.values()) if stack]


def enable_stack_dump(file: int | None = None) -> bool:
    """Dump the main thread's stack on SIGUSR2 from now on; return False if the program uses that signal itself."""
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return False
    with suppress(OSError, AttributeError):  # a kernel without memory files
        file = os.memfd_create(MEMFD_NAME) if file is None else file
        # Not of all threads: reading frames that another thread is just leaving would crash.
        faulthandler.register(STACK_SIGNAL, file, all_threads=False)
        return True
    return False


def request_stack(pid: int) -> None:
    """Signal the main thread of a process to dump its stack: another one may handle it too late."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, pid, STACK_SIGNAL):
        os.kill(pid, STACK_SIGNAL)


def fetch_stacks(pid: int) -> list[Stack]:
    """Return the stacks of a process that dumps them; [] for any other, which the signal would kill."""
    with suppress(OSError, StopIteration):
        files = Path(f"/proc/{pid}/fd").iterdir()
        file = next(file for file in files if os.readlink(file).startswith(f"/memfd:{MEMFD_NAME}"))
        request_stack(pid)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline and not read_stacks(file):
            time.sleep(0.01)
        time.sleep(0.01)  # for the rest of it
        return read_stacks(file)
    return []


def list_children(pid: int) -> list[int]:
    import psutil

    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


@dataclass(frozen=True)
class CollectiveCall:
    group: str
    number: int
    name: str
    done: bool

    def __str__(self) -> str:
        return f"{self.name}, number {self.number} of group {self.group}"


Calls = Mapping[str, CollectiveCall]


def enable_flight_recorder(environ: MutableMapping[str, str]) -> None:
    """Set in `environ` that torch records collectives, unless the user has set how many; call it before ranks join."""
    environ.setdefault(BUFFER_VARIABLE, environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", BUFFER_CALLS))


def dump_own_calls() -> str:
    """Return the last call of this process in each group for `read_calls`; "" if none are recorded."""
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
    """Return a recorded collective; None for point-to-point messages and unknown formats of torch."""
    with suppress(KeyError, TypeError, IndexError, ValueError, AttributeError):
        if not entry["is_p2p"]:
            backend, _, name = entry["profiling_name"].partition(":")
            group = f"{backend} {entry['process_group'][0]}"  # each backend of a group counts its own calls
            done = entry["retired"] or entry["state"] == "completed"
            return CollectiveCall(group, int(entry["collective_seq_id"]), name, bool(done))
    return None


def read_calls(folder: Path, rank: int) -> Calls:
    """Return the last calls of a rank by group; {} if it left none."""
    with suppress(UserError, OSError, KeyError, TypeError, ValueError, AttributeError):
        calls = read_json(trace_file(folder, rank, "collectives"))
        return {group: from_flat(CollectiveCall, values) for group, values in calls.items()}
    return {}


def find_pending_call(calls: Calls) -> CollectiveCall | None:
    return next((call for call in calls.values() if not call.done), None)
