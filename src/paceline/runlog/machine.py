"""The machine and the software of a run: versions, processor and GPUs, and what a rank uses of them."""

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from paceline import __version__
from paceline.io.format import number

BUSY = 1.25  # load per core
PACKAGES = ("torch", "numpy", "tokenizers")


def describe_environment() -> dict[str, Any]:
    """Return versions, host, processor, memory, GPUs and the current commit, without initialising a device."""
    return {
        "paceline": __version__,
        "python": platform.python_version(),
        **{package: _find_version(package) for package in PACKAGES},
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _read_field("model name", Path("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": list_gpu_names(),
        "commit": _describe_commit(),
    }


class MachineLoad(NamedTuple):
    cores: int = 0
    load: float = 0.0  # average of a minute

    @property
    def busy(self) -> bool:
        """Return whether other work fills the machine."""
        return bool(self.cores) and self.load > BUSY * self.cores

    def __str__(self) -> str:
        return f"a load of {number(self.load, 3)} on {self.cores} cores"


def _find_version(package: str) -> str | None:
    loaded = getattr(sys.modules.get(package), "__version__", None)
    with suppress(metadata.PackageNotFoundError):
        return str(loaded) if loaded else metadata.version(package)
    return None


def list_gpu_names() -> list[str]:
    """Return GPU names from the driver, or from torch if CUDA is initialised already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [name for file in files if (name := _read_field("Model", file))]


def _read_field(key: str, file: Path) -> str | None:
    try:
        found = re.search(rf"^{key}\s*:\s*(.+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1].strip() if found else None


def _describe_commit() -> str | None:
    """Return the current commit, with "-dirty" if files have changed, without running commands of the repository.

    With a local filter, which is such a command, files cannot be compared.
    """
    filters = _run_git("config", "--includes", "--show-scope", "--get-regexp", r"^filter\.")
    if filters is None:
        return None
    has_filters = any(line.split("\t")[0] in ("local", "worktree") for line in filters.splitlines())
    return _run_git("describe", "--always", *([] if has_filters else ["--dirty"]), "--abbrev=40", "--exclude=*") or None


NO_COMMANDS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "diff.ignoreSubmodules=all", "protocol.allow=never")


def _run_git(*words: str) -> str | None:
    """Return the output of git, empty if it found nothing, or None if it failed."""
    try:
        command = ["git", *(word for setting in NO_COMMANDS for word in ("-c", setting)), *words]
        text: Any = {"text": True, "errors": "replace", "capture_output": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, **text, timeout=2, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 or (done.returncode == 1 and not done.stdout) else None


EVERY_S = 5.0
LOOPBACK = "lo"
INFINIBAND = Path("/sys/class/infiniband")
WORD_BYTES = 4  # unit of InfiniBand's traffic counters


def load_nvml() -> Any:
    """Return nvidia-ml-py; None if it is not installed, or has no driver to ask."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def find_device_handles(nvml: Any, ranks: int, environ: Mapping[str, str]) -> list[Any]:
    """Return the devices of so many ranks: the first of those that CUDA can see. NVML itself sees all."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    handles: list[Any] = []
    with suppress(nvml.NVMLError, ValueError):
        names = visible.split(",") if visible is not None else list(map(str, range(nvml.nvmlDeviceGetCount())))
        for name in map(str.strip, names[:ranks]):
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            handles.append(by_index(int(name)) if name.isdigit() else by_uuid(name))
    return handles


def read_device_usage(nvml: Any, device: Any) -> dict[str, float]:
    """Return how much of a device is in use, as far as its driver tells."""
    usage: dict[str, float] = {}
    reads: dict[str, Callable[[], float]] = {
        "device_share": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
        "device_watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
        "device_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(device).used),
    }
    for name, read in reads.items():
        with suppress(nvml.NVMLError, AttributeError):
            usage[name] = read()
    return usage


class RankUsage:
    """Sample what a rank uses of its device, cores, memory and network, at most every few seconds."""

    def __init__(self, uuid: str = "", nvml: Any = None) -> None:
        """Watch the device with this UUID through `nvml` (nvidia-ml-py)."""
        self._nvml = nvml
        self._device: Any = None
        self._asked = monotonic() - EVERY_S
        self._counted: dict[str, float] = {}
        if nvml is not None:
            with suppress(Exception):
                self._device = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    @classmethod
    def of(cls, device: Any) -> "RankUsage":
        """Watch a torch device and this process."""
        if device.type == "cuda" and (nvml := load_nvml()) is not None:
            import torch

            return cls(str(getattr(torch.cuda.get_device_properties(device), "uuid", "")), nvml)
        return cls()

    def now(self) -> dict[str, float]:
        """Return current usage, or nothing if sampled a moment ago. Network traffic is that of the whole machine."""
        since_s = monotonic() - self._asked
        if since_s < EVERY_S:
            return {}
        self._asked += since_s
        found = {} if self._device is None else read_device_usage(self._nvml, self._device)
        import psutil

        with suppress(psutil.Error, OSError):
            found["resident_bytes"] = float(psutil.Process().memory_info().rss)
        counted = {"cores": sum(os.times()[:2]), "network_bytes_s": count_network_bytes()}
        if self._counted:
            found |= {name: (value - self._counted[name]) / since_s for name, value in counted.items()}
        self._counted = counted
        return found


def count_network_bytes(infiniband: Path = INFINIBAND) -> float:
    """Return bytes sent and received through all interfaces of this machine but the loopback."""
    import psutil

    counters = psutil.net_io_counters(pernic=True)
    total = sum(n.bytes_sent + n.bytes_recv for name, n in counters.items() if name != LOOPBACK)
    for kind in ("xmit", "rcv"):
        for file in infiniband.glob(f"*/ports/*/counters/port_{kind}_data"):
            with suppress(OSError, ValueError):
                total += WORD_BYTES * int(file.read_text())
    return float(total)
