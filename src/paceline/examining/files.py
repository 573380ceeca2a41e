"""Where a run writes: is there room, how fast is it, and do worker processes have memory to share?"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.examining.results import CheckResult, Health, Surroundings
from paceline.record.units import number, size

TOPIC = "files"
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES, ENOUGH_SHARED_BYTES = 256e6, 1e9
LEAST_ROOM_BYTES, ENOUGH_ROOM_BYTES = 1e9, 5e9
LEAST_RATE_BYTES_S = 50e6
WRITTEN_BYTES = 64 << 20
BLOCK_BYTES = 4 << 20
WRITING_S = 0.4
SMALL_FILES = 50


def shared_memory(here: Surroundings) -> Iterator[CheckResult]:
    """Worker processes hand batches over in it; containers often have 64 MB, and die of a bus error."""
    if not SHARED_MEMORY.is_dir():
        yield CheckResult(TOPIC, "shared memory", f"there is no {SHARED_MEMORY}", "", Health.NOT_HERE)
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    yield CheckResult(
        *(TOPIC, "shared memory", f"{size(free)} free in {SHARED_MEMORY}", f"{size(ENOUGH_SHARED_BYTES)} or more"),
        _by_size(free, LEAST_SHARED_BYTES, ENOUGH_SHARED_BYTES),
        "docker run --shm-size=8g …  or --ipc=host; pods: an emptyDir of medium Memory at /dev/shm",
    )


def room(here: Surroundings) -> Iterator[CheckResult]:
    """For checkpoints."""
    folder = existing(here.folder)
    usage, names = shutil.disk_usage(folder), os.statvfs(folder)
    remedy = "delete old runs and checkpoints, or write elsewhere with  --out FOLDER"
    if names.f_files and not names.f_favail:
        found = f"{folder}: no file can be added, though {size(usage.free)} are free"
        yield CheckResult(TOPIC, "room", found, "", Health.WRONG, remedy)
        return
    yield CheckResult(
        *(TOPIC, "room", f"{size(usage.free)} free of {size(usage.total)} at {folder}"),
        f"{size(ENOUGH_ROOM_BYTES)} or more",
        _by_size(usage.free, LEAST_ROOM_BYTES, ENOUGH_ROOM_BYTES),
        remedy,
    )


def disk_speed(here: Surroundings) -> Iterator[CheckResult]:
    """Written for less than half a second, read back, and some small files; all of it is deleted."""
    folder = existing(here.folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".paceline-doctor-", dir=folder) as scratch:
            written, read = _large(Path(scratch, "large"))
            small = _small(Path(scratch))
    except OSError as error:
        yield CheckResult(
            *(TOPIC, "disk speed", f"{folder} cannot be written: {error.strerror}", "a folder to write to"),
            *(Health.WRONG, "write elsewhere with  --out FOLDER, or make room"),
        )
        return
    yield CheckResult(
        *(TOPIC, "disk speed", f"writes {size(written)}/s, reads {size(read)}/s, {number(small, 2)} small files/s"),
        f"{size(LEAST_RATE_BYTES_S)}/s or more",
        Health.OK if min(written, read) >= LEAST_RATE_BYTES_S else Health.LOOK,
        "put runs on a faster file system with  --out FOLDER; checkpoints wait for this one",
    )


def existing(folder: Path) -> Path:
    """The folder, or the one in which it would be made."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _large(file: Path) -> tuple[float, float]:
    """(bytes written per second, until they are on the disk; bytes read per second)."""
    block, count = os.urandom(BLOCK_BYTES), 0
    with file.open("wb") as out:
        began = time.perf_counter()
        while count * BLOCK_BYTES < WRITTEN_BYTES and time.perf_counter() - began < WRITING_S:
            out.write(block)
            count += 1
        out.flush()
        os.fsync(out.fileno())
        written_s = time.perf_counter() - began
        with suppress(OSError):
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or memory would be read
    began = time.perf_counter()
    with file.open("rb", buffering=0) as content:
        while content.read(BLOCK_BYTES):
            pass
    return count * BLOCK_BYTES / written_s, count * BLOCK_BYTES / (time.perf_counter() - began)


def _small(folder: Path) -> float:
    began = time.perf_counter()
    for index in range(SMALL_FILES):
        (folder / str(index)).write_bytes(b"x")
    return SMALL_FILES / (time.perf_counter() - began)


def _by_size(amount: float, least: float, enough: float) -> Health:
    return Health.OK if amount >= enough else Health.LOOK if amount >= least else Health.WRONG
