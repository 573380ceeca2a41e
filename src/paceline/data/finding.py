"""Finding the user's files: in a folder and the folders in it, or by a pattern. Who only looks gives up where many are.

Folders may be nested deeper than Python calls functions, and links may lead in a circle.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UserError

LOOKED_AT = 10_000
"""Names of files and folders that a plan looks at: it answers at once, whatever a path leads to."""


class TooMany(UserError):
    """More files than who only looks goes through."""


@dataclass
class Walk:
    """One walk through folders, which counts what it comes by."""

    most: int | None = None
    """Names after which it gives up; None goes through all."""
    seen: int = 0
    given: set[str] = field(default_factory=set)

    def below(self, folder: Path, enter: Callable[[str], bool] = lambda name: True) -> Iterator[Path]:
        """The files in a folder and in those below whose names may be entered, in no order; no link to a folder is."""
        folders = [str(folder)]
        while folders:
            for entry in self._entries(folders.pop()):
                if not enter(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False) or (entry.is_symlink() and os.path.isfile(entry.path)):
                    yield Path(entry.path)

    def matching(self, pattern: Path) -> Iterator[Path]:
        """The files that match a pattern as those of `glob`, in no order; `**` goes through a circle of links once."""
        parts = [p for p, before in zip(pattern.parts, ("", *pattern.parts), strict=False) if not p == before == "**"]
        anchor = [pattern.anchor] if pattern.anchor else []
        waiting = [("".join(anchor), parts[len(anchor) :], frozenset[tuple[int, int]]())]
        while waiting:
            folder, (part, *rest), above = waiting.pop()
            if part == "**":
                found = os.stat(folder or ".")
                if (here := (found.st_dev, found.st_ino)) in above:
                    continue
                if rest:
                    waiting.append((folder, rest, frozenset()))
                inner, above = [part, *rest], above | {here}
            else:
                inner, above = rest, frozenset()
            for path in self._next(folder, part):
                if inner and os.path.isdir(path):
                    waiting.append((path, inner, above))
                elif not rest and path not in self.given and os.path.isfile(path):
                    self.given.add(path)
                    yield Path(path)

    def _next(self, folder: str, part: str) -> Iterator[str]:
        """What one part of a pattern stands for in a folder."""
        if part != "**" and not glob.has_magic(part):
            path = os.path.join(folder, part)
            return iter([path] if os.path.lexists(path) else [])
        wanted = "*" if part == "**" else part
        names = (entry.name for entry in self._entries(folder or "."))
        shown = (name for name in names if not name.startswith(".") or wanted.startswith("."))
        return (os.path.join(folder, name) for name in shown if fnmatch.fnmatch(name, wanted))

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Nothing where a folder may not be read."""
        try:
            opened = os.scandir(folder)
        except PermissionError:
            return
        with opened as entries:
            for entry in entries:
                self.seen += 1
                if self.most is not None and self.seen > self.most:
                    raise TooMany(f"{folder}: there are more than {self.most:,} files and folders; not looked at")
                yield entry
