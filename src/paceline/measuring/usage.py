"""Device and network use while something runs, sampled by a thread: psutil for the host, NVML for NVIDIA devices."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

EVERY_S = 0.5


class Usage:
    """`with Usage() as usage: …`, then `usage.means()`: shares of the cores and devices, bytes per second sent."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self._sums: dict[str, float] = {}
        self._taken = 0
        self._nvml = _nvml()

    def __enter__(self) -> Usage:
        import psutil

        psutil.cpu_percent()
        self._sent = psutil.net_io_counters(nowrap=False)
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def means(self) -> dict[str, float]:
        return {name: total / self._taken for name, total in self._sums.items()} if self._taken else {}

    def _sample(self) -> None:
        while not self._over.wait(self._every_s):
            for name, value in self._now().items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            self._taken += 1

    def _now(self) -> dict[str, float]:
        import psutil

        sent, self._sent = self._sent, psutil.net_io_counters(nowrap=False)
        found = {"cpu_share": psutil.cpu_percent() / 100}
        if sent is not None and self._sent is not None:
            found["sent_bytes_s"] = max(0.0, self._sent.bytes_sent - sent.bytes_sent) / self._every_s
        return {**found, **self._devices()}

    def _devices(self) -> dict[str, float]:
        if self._nvml is None:
            return {}
        shares, used = [], []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            with suppress(self._nvml.NVMLError):
                device = self._nvml.nvmlDeviceGetHandleByIndex(index)
                shares.append(self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
                used.append(float(self._nvml.nvmlDeviceGetMemoryInfo(device).used))
        if not shares:
            return {}
        return {"device_share": sum(shares) / len(shares), "device_bytes": max(used)}


def _nvml() -> Any:
    """NVML, where nvidia-ml-py and a driver are there."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml
