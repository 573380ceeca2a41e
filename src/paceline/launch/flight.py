"""What torch's flight recorder knows of the collectives of a rank.

On GPUs a collective runs after the call that asked for it has returned: a rank that waits in one is at some other line
of Python, and only the recorder tells who has called which.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.record.files import from_flat, read_json

KEPT, KEPT_BEFORE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""How many calls are kept: the variable, and its older name."""
ENOUGH = "2000"
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
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


def keep_calls(environ: MutableMapping[str, str]) -> None:
    """Before ranks join; what the user has set stays."""
    if KEPT_BEFORE not in environ:
        environ.setdefault(KEPT, ENOUGH)


def own_calls() -> str:
    """The last call of this process in each group, for `read_calls`; nothing where none are kept."""
    found: dict[str, CollectiveCall] = {}
    for entry in _entries():
        call = _call(entry)
        if call is not None and (call.group not in found or call.number > found[call.group].number):
            found[call.group] = call
    return json.dumps({group: asdict(call) for group, call in found.items()}) if found else ""


def _entries() -> Iterator[Any]:
    torch: Any = sys.modules.get("torch")
    for name in DUMPS if torch is not None and torch.distributed.is_available() else ():
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            with suppress(RuntimeError, ValueError, AttributeError):
                yield from json.loads(dump()).get("entries", ())


def _call(entry: Any) -> CollectiveCall | None:
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


def in_flight(calls: Calls) -> CollectiveCall | None:
    """The one that a rank waits in, if it does."""
    return next((call for call in calls.values() if not call.done), None)


def so_far(calls: Calls) -> int:
    """How many there were, of all groups."""
    return sum(call.number for call in calls.values())
