"""What a rank uses of its machine, asked between steps now and then, for the record of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

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
        counted = {"cores": _core_s(), "network_bytes_s": network_bytes(os.environ)}
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


def network_bytes(environ: Mapping[str, str], infiniband: Path = INFINIBAND) -> float:
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
