"""The machine and the software of a run: versions, processor and GPUs, and what a rank uses of them."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any

from paceline import __version__

BUSY = 1.25
"""Load over cores, from which on a machine is called busy."""
PACKAGES = ("torch", "numpy", "tokenizers")


def describe_environment() -> dict[str, Any]:
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
        "gpus": list_gpu_names(),
        "commit": _commit(),
    }


def describe_load(load: float, cores: int) -> str:
    """A warning where other work fills the machine already; empty where it does not."""
    if not cores or load <= BUSY * cores:
        return ""
    return f"this machine is busy: a load of {load:.1f} on {cores} cores, so steps take longer than they need to"


def get_load() -> float:
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


def list_gpu_names() -> list[str]:
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


EVERY_S = 5.0
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""The variables that say what ranks send through."""
LOOPBACK = "lo"
INFINIBAND = Path("/sys/class/infiniband")
WORD_BYTES = 4
"""In which InfiniBand counts what it carries."""


class RankUsage:
    """Asked at most every few seconds: no thread, and what nobody knows is left out."""

    def __init__(self, uuid: str = "", nvml: Any = None) -> None:
        """Of the device with this UUID, as torch knows it; `nvml` is nvidia-ml-py."""
        self._nvml = nvml
        self._device: Any = None
        self._asked = monotonic() - EVERY_S
        self._counted: dict[str, float] = {}
        """At the last time: seconds of cores and bytes of the network, which grow."""
        if nvml is not None:
            with suppress(Exception):
                nvml.nvmlInit()
                self._device = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    @classmethod
    def of(cls, device: Any) -> RankUsage:
        """Of a torch device, and of this process."""
        if device.type != "cuda":
            return cls()
        with suppress(Exception):
            import pynvml
            import torch

            return cls(str(torch.cuda.get_device_properties(device).uuid), pynvml)
        return cls()

    def now(self) -> dict[str, float]:
        """Empty where it was asked a moment ago. The network is that of the machine: ranks on one share it."""
        since_s = monotonic() - self._asked
        if since_s < EVERY_S:
            return {}
        self._asked += since_s
        found = self._of_device()
        import psutil

        with suppress(psutil.Error, OSError):
            found["resident_bytes"] = float(psutil.Process().memory_info().rss)
        counted = {"cores": _core_s(), "network_bytes_s": count_network_bytes(os.environ)}
        if self._counted:
            found |= {name: (value - self._counted[name]) / since_s for name, value in counted.items()}
        self._counted = counted
        return found

    def _of_device(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._device is None:
            return found
        with suppress(self._nvml.NVMLError):
            found["device_share"] = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100
        with suppress(self._nvml.NVMLError):
            found["device_watts"] = self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1000
        with suppress(self._nvml.NVMLError):
            found["device_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)
        return found


def _core_s() -> float:
    """That this process has had."""
    times = os.times()
    return times.user + times.system


def count_network_bytes(environ: Mapping[str, str], infiniband: Path = INFINIBAND) -> float:
    """Sent and received so far, through the interfaces that ranks were given, or all but the loopback."""
    import psutil

    named = next((environ[name] for name in INTERFACES if environ.get(name)), "")
    given = {word.strip("^=") for word in named.split(",")} if named and not named.startswith("^") else set()
    counters = psutil.net_io_counters(pernic=True)
    used = [one for name, one in counters.items() if (name in given if given else name != LOOPBACK)]
    words = (file for kind in ("xmit", "rcv") for file in infiniband.glob(f"*/ports/*/counters/port_{kind}_data"))
    return sum(one.bytes_sent + one.bytes_recv for one in used) + WORD_BYTES * sum(map(_number, words))


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
