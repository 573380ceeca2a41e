"""What happened, as lines of JSON that are only ever added: one file per rank, one event per line.

A "step" event is numbered by the steps done once it is over (the first is 1) and holds

    step  epoch  samples  loss  grad_norm  lr  step_s  data_s  compute_s  comm_s  exposed_s  batch  tokens  skipped

where `samples` counts from the start of the run and `batch` and `tokens` are those of the step; one in which something
was compiled or recorded is marked as `compiled`. The other kinds are start, evaluate, checkpoint, usage (of the device,
every few seconds), resume, extend (the run became longer), done (early, and why) and end.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import RunFailed, UserError
from paceline.io.files import replace_nonfinite, to_json_value
from paceline.io.safe_open import open_regular

HELD = 1000
"""Steps that are kept in memory at most."""
LONGEST = 1 << 24
"""Bytes of a line; what goes on for longer is no event, nor is what comes after it."""
NOT_METRICS = ("kind", "t", "step", "epoch", "samples", "n", "of", "count", "evaluate_s", "seconds")

COUNTS = frozenset(("step", "epoch", "samples", "tokens", "ranks", "local_ranks", "workers", "threads", "memory_bytes"))
"""Values that are whole numbers."""
AMOUNTS = COUNTS.union(
    ("t", "loss", "grad_norm", "lr", "batch", "cores"),
    (f"{name}_s" for name in ("load", "step", "data", "compute", "comm", "exposed")),
)
"""Values that are numbers, or not known."""
LARGEST = 1e300

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=to_json_value).encode
_decode = json.JSONDecoder().decode


class RunStatus(StrEnum):
    """How an attempt at a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """As asked, after a checkpoint."""
    FAILED = "failed"


class EventWriter:
    """Adds events to a file, in whole lines.

    Steps are held in memory until `flush`; an event of any other kind is rare and goes out at once, with all that
    came before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RunFailed(f"{path} is a link, and events are not written to another place; remove it") from None
            raise RunFailed(f"cannot write {path}: {error.strerror}") from error
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._append(b"\n")

    def write(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "t": round(time.time(), 6), **values}
        try:
            self._held.append(_encode(event))
        except ValueError:
            self._held.append(_encode(replace_nonfinite(event)))
        if kind != "step" or len(self._held) >= HELD:
            self.flush()

    def flush(self) -> None:
        """Hand the events held so far to the system: a kill does not undo that."""
        lines = "".join(f"{line}\n" for line in self._held)
        self._held.clear()
        self._append(lines.encode(errors="replace"))

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1

    def _append(self, lines: bytes) -> None:
        try:
            while lines:
                lines = lines[os.write(self._file, lines) :]
            removed = not os.fstat(self._file).st_nlink  # what is written to it now is nowhere
        except OSError as error:
            raise RunFailed(f"cannot write {self.path}: {error.strerror}") from error
        if removed:
            raise RunFailed(f"{self.path} was removed while the run wrote to it")

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_events(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The events of a file, in the order in which they were written; of one kind, if given.

    A line torn by a kill or damaged by a disk is passed over. A rank that never came to write has no events.
    """
    for _, event in read_event_lines(path):
        if event is not None and (kind is None or event["kind"] == kind):
            yield event


def read_event_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(number of the line from 1, its event); None for a line that cannot be read."""
    if not os.path.isfile(path):
        return
    with _readable(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
            event = parse_event(line)
            if event is not None or line.strip():
                yield number, event
            if len(line) == LONGEST:
                return


def _readable(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None where it was torn by a kill or damaged, and values are not of the kind they must be."""
    try:
        event = _decode(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    for name, value in event.items():  # by the type itself: a report reads a million of these
        kind = type(value)
        if kind is float or kind is int or kind is bool:
            if (kind is float and name in COUNTS) or ((kind is int or name in AMOUNTS) and not abs(value) <= LARGEST):
                return None
        elif value is not None and name in AMOUNTS:
            return None
    listed = event["kind"] != "start" or isinstance(event.get("gpus") or [], list)
    return event if listed else None


def read_steps(path: Path) -> list[dict[str, Any]]:
    return drop_undone_steps(read_events(path))


def drop_undone_steps(events: Iterable[dict[str, Any]], kind: str = "step") -> list[dict[str, Any]]:
    """The events of a kind that has a step, once each and in order.

    A run that was resumed has gone back, so what an earlier attempt did after that point is left out.
    """
    found: list[dict[str, Any]] = []
    for event in events:
        number = event.get("step")
        if event["kind"] not in (kind, "resume") or not isinstance(number, int):
            continue
        undone = number if event["kind"] == kind else number + 1
        while found and found[-1]["step"] >= undone:
            found.pop()
        if event["kind"] == kind:
            found.append(event)
    return found


def extract_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an "evaluate" event: its numbers, without those that say when and on how much."""
    values = event.get("metrics", event)
    values = values if isinstance(values, Mapping) else event
    return {
        name: math.nan if value is None else float(value)
        for name, value in values.items()
        if name not in NOT_METRICS
        and (value is None or type(value) is float or (type(value) is int and abs(value) <= LARGEST))
    }


def sum_wall_seconds(path: Path) -> float:
    """Wall time of all attempts of a run: each from its "start" to the last event before the next."""
    total = began = last = 0.0
    for event in read_events(path):
        if event["kind"] == "start":
            total += last - began
            began = event.get("t") or last
        last = event.get("t") or last
    return total + last - began
