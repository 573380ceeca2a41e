"""A hash of the contents of the user's files, noted in the cache by their sizes and times: one reads the files, and
others who ask, ranks or a plan, read the note."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.data.files import digest_of_files, digest_of_value
from paceline.errors import RunFailed, UserError
from paceline.plain_files import read_text
from paceline.record.files import write_atomic

LOOKED_BYTES = 64 << 20
"""That who only looks reads to find prepared data; of larger files it takes the note alone."""


class TooLong(UserError):
    """More bytes than who only looks reads."""


def noted_digest(files: Sequence[Path], folder: Path, looking: bool = False) -> str:
    """The hash, from the note in a folder or read now. `looking`: TooLong where that would take a while."""
    stats = [file.stat() for file in files]
    facts = [
        (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for file, stat in zip(files, stats, strict=True)
    ]
    note = folder / f"text-{digest_of_value(facts)[:16]}.digest"
    with suppress(OSError, ValueError):
        found, check = read_text(note).split(" ")
        if check == digest_of_value(found):
            return found
    if looking and sum(stat.st_size for stat in stats) > LOOKED_BYTES:
        raise TooLong(f"{files[0]}: more than {LOOKED_BYTES:,} bytes; not looked at")
    found = digest_of_files(files)
    with suppress(OSError, RunFailed):  # said where the corpus is written
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(note, f"{found} {digest_of_value(found)}")
    return found
