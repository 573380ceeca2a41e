"""Events of a run: append-only lines of JSON, one file per rank.

A "step" event, numbered from 1, holds

    step  epoch  samples  loss  grad_norm  lr  step_s  data_s  compute_s  comm_s  exposed_s  batch  tokens  skipped

where `samples` counts from the start of the run; `compiled` marks a step in which something was compiled or recorded.
The other kinds are start, evaluate, checkpoint, usage (of the device), resume, extend, done (early, and why) and end.
"""

import errno
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UserError
from paceline.io.files import open_regular, replace_nonfinite, to_json_value

MAX_BUFFERED = 1000  # step events in memory
LONGEST = 1 << 24  # bytes of a line; reading stops at a longer one
STEP_BYTES, RECENT_BYTES = 400, 4 << 20  # of a step, about; of the newest lines, which are always read
NOT_METRICS = ("kind", "t", "step", "epoch", "samples", "n", "of", "count", "evaluate_s", "seconds")

COUNTS = frozenset(("step", "epoch", "samples", "tokens", "ranks", "local_ranks", "workers", "threads", "memory_bytes"))
AMOUNTS = COUNTS.union(
    ("t", "loss", "grad_norm", "lr", "batch", "cores"),
    (f"{name}_s" for name in ("load", "step", "data", "compute", "comm", "exposed")),
)
"""Values that are numbers or None."""
LARGEST = 1e300

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=to_json_value).encode
_decode = json.JSONDecoder().decode


class RunStatus(StrEnum):
    """How an attempt at a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """On request, after a checkpoint."""
    FAILED = "failed"


class EventWriter:
    """Append events to a file in whole lines.

    Step events are buffered until `flush`; an event of any other kind is written at once, with all before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer: list[str] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            reason = "it is a link; remove it" if error.errno == errno.ELOOP else error.strerror
            raise RunFailed(f"cannot write {path}: {reason}") from error
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._append_lines(b"\n")

    def write(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, "t": round(time.time(), 6), **values}
        try:
            self._buffer.append(_encode(event))
        except ValueError:
            self._buffer.append(_encode(replace_nonfinite(event)))
        if kind != "step" or len(self._buffer) >= MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Pass buffered events to the operating system, so that a kill cannot lose them."""
        lines = "".join(f"{line}\n" for line in self._buffer)
        self._buffer.clear()
        self._append_lines(lines.encode(errors="replace"))

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1

    def _append_lines(self, lines: bytes) -> None:
        try:
            while lines:
                lines = lines[os.write(self._file, lines) :]
            removed = not os.fstat(self._file).st_nlink
        except OSError as error:
            raise RunFailed(f"cannot write {self.path}: {error.strerror}") from error
        if removed:
            raise RunFailed(f"{self.path} was removed while the run wrote to it")

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_events(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in order, of one kind if given; torn or damaged lines are skipped."""
    for _, event in read_event_lines(path):
        if event is not None and (kind is None or event["kind"] == kind):
            yield event


def read_event_lines(path: Path, most_steps: int = 0) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number from 1, event); the event is None if the line cannot be read.

    `most_steps`: of a long file about so many steps, and every other event (`_thin_steps`).
    """
    if not os.path.isfile(path):
        return
    try:
        opened = open_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    with opened as file:
        lines: Iterable[tuple[int, bytes]] = enumerate(iter(lambda: file.readline(LONGEST), b""), 1)
        size = os.fstat(file.fileno()).st_size
        if most_steps and (stretch := 3 * size // (most_steps * STEP_BYTES)) > 3:
            lines = _thin_steps(lines, size - RECENT_BYTES, stretch)
        for number, line in lines:
            event = parse_event(line)
            if event is not None or line.strip():
                yield number, event
            if len(line) == LONGEST:
                return


def _thin_steps(lines: Iterable[tuple[int, bytes]], until: int, stretch: int) -> Iterator[tuple[int, bytes]]:
    """Yield, of so many steps in a row, the first and those with the lowest and highest loss; other and new lines all.

    They are chosen without parsing, so that a million steps are read in seconds, and no spike is lost.
    """
    read, row = 0, list[tuple[float, int, bytes]]()
    for number, line in lines:
        read += len(line)
        plain = line.startswith(b'{"kind":"step",') and line.endswith(b"}\n") and b'"compiled"' not in line
        if plain and read < until:
            begin = line.find(b'"loss":') + len(b'"loss":')
            try:
                loss = float(line[begin : line.find(b",", begin)])
            except ValueError:
                loss = math.inf
            row.append((loss, number, line))
            if len(row) < stretch:
                continue
        if row:
            yield from sorted((at, kept) for _, at, kept in {row[0], min(row), max(row)})
            row.clear()
        if not plain or read >= until:
            yield number, line


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if it is torn, damaged or has values of a wrong type."""
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


def read_steps(path: Path, most: int = 0) -> list[dict[str, Any]]:
    """Return the step events of a file by step; `most`: as of `read_event_lines`."""
    return drop_undone_steps(event for _, event in read_event_lines(path, most) if event is not None)


def drop_undone_steps(events: Iterable[dict[str, Any]], kind: str = "step") -> list[dict[str, Any]]:
    """Return the events of a kind by step, without those that were repeated after a resume."""
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
    """Return the metrics of an "evaluate" event: its numbers, without step, counts and times."""
    values = event.get("metrics", event)
    values = values if isinstance(values, Mapping) else event
    return {
        name: math.nan if value is None else float(value)
        for name, value in values.items()
        if name not in NOT_METRICS
        and (value is None or type(value) is float or (type(value) is int and abs(value) <= LARGEST))
    }


def sum_wall_seconds(path: Path, per_rank: bool = False) -> float:
    """Return the wall time of all attempts, each from its "start" to its last event; `per_rank`: times their ranks."""
    total, began, last, ranks = 0.0, 0.0, 0.0, 0
    for event in read_events(path):
        if (now := event.get("t")) is None:
            continue
        if event["kind"] == "start":
            total += (last - began) * ranks
            began, ranks = now, (event.get("ranks") or 1) if per_rank else 1
        last = now
    return total + (last - began) * ranks
