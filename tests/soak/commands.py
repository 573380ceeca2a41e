"""`paceline` as a user starts it, and all processes of it."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from forked import start_forked

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "src"
CLOCK = HERE / "jumping_clock"


@dataclass
class Command:
    process: subprocess.Popen[bytes]
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def tree(self) -> list[psutil.Process]:
        """The command itself, and then what it started."""
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            found = [top, *top.children(recursive=True)]
            self.seen.update({one.pid: one for one in found})
            return found
        return []

    def alive(self) -> list[int]:
        """Its processes that have not ended."""
        found = []
        for pid, one in self.seen.items():
            with suppress(psutil.Error):
                if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    def kill(self) -> None:
        self.tree()
        for pid in self.alive():
            with suppress(psutil.Error):
                self.seen[pid].kill()


def start_command(words: list[str], folder: Path, log: Path, jumps: str = "", forked: bool = False) -> Command:
    path = [*([str(CLOCK)] if jumps else []), str(SOURCES)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CLOCK_JUMPS": jumps or "0 0"}
    with log.open("ab") as out:
        options: dict[str, Any] = {"cwd": folder, "stdout": out, "stderr": out, "env": environ}
        if forked:
            return Command(start_forked(words, **options))
        return Command(subprocess.Popen([sys.executable, "-m", "paceline", *words], **options))
