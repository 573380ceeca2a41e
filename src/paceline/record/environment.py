"""The machine and the software a run was made on: enough to compare two runs, and nothing that is private."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline import __version__

BUSY = 1.25
"""Load over cores, from which on a machine is called busy."""
PACKAGES = ("torch", "numpy", "tokenizers")


def environment() -> dict[str, Any]:
    """Versions, host, processor, memory, GPUs and the commit of the current folder. Starts no device."""
    return {
        "paceline": __version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _named("model name", Path("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": gpu_names(),
        "commit": _commit(),
    }


def busy_words(load: float, cores: int) -> str:
    """A warning where other work fills the machine already; empty where it does not."""
    if not cores or load <= BUSY * cores:
        return ""
    return f"this machine is busy: a load of {load:.1f} on {cores} cores, so steps take longer than they need to"


def load_now() -> float:
    """Processes that wanted a core in the last minute, on average."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _version(package: str) -> str | None:
    loaded = sys.modules.get(package)
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu_names() -> list[str]:
    """As the driver lists them; asked of torch only where it holds the devices already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [name for file in files if (name := _named("Model", file))]


def _named(key: str, file: Path) -> str | None:
    try:
        found = re.search(rf"^{key}\s*:\s*(.+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1].strip() if found else None


def _commit() -> str | None:
    """The commit checked out here, with "-dirty" behind it where files were changed since.

    A repository's own settings can name commands, and it may have come from anywhere: none of them is run. Where it has
    filters of its own, without which no file can be compared, nothing is said of changes.
    """
    filters = _git("config", "--includes", "--show-scope", "--get-regexp", r"^filter\.")
    if filters is None:
        return None
    its_own = any(line.split("\t")[0] in ("local", "worktree") for line in filters.splitlines())
    return _git("describe", "--always", *([] if its_own else ["--dirty"]), "--abbrev=40", "--exclude=*") or None


NO_COMMANDS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "diff.ignoreSubmodules=all", "protocol.allow=never")


def _git(*words: str) -> str | None:
    """What git says; empty where it finds nothing, None where it fails."""
    try:
        done = subprocess.run(
            ["git", *(word for setting in NO_COMMANDS for word in ("-c", setting)), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 or (done.returncode == 1 and not done.stdout) else None
