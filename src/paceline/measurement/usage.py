"""Sample the use of cores, network and devices in a thread: psutil for the host, NVML for NVIDIA devices."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from time import time
from typing import Any

EVERY_S = 0.25
PEAKS = ("device_bytes",)  # maxima; others are means


class UsageSampler:
    """`with UsageSampler(ranks) as usage: …`, then `usage.between(begin, end)`, in Unix times."""

    def __init__(self, ranks: int = 1, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._nvml = load_nvml()
        self._devices = find_device_handles(self._nvml, ranks, os.environ) if self._nvml is not None else []

    def __enter__(self) -> UsageSampler:
        import psutil

        psutil.cpu_percent()
        self._sent = psutil.net_io_counters(nowrap=False)
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> dict[str, float]:
        taken = [values for t, values in self._samples if begin <= t <= end]
        found = {name: [v[name] for v in taken if name in v] for name in (taken[-1] if taken else {})}
        return {name: max(vs) if name in PEAKS else math.fsum(vs) / len(vs) for name, vs in found.items()}

    def _sample(self) -> None:
        while not self._over.wait(self._every_s):
            self._samples.append((time(), self._now()))

    def _now(self) -> dict[str, float]:
        import psutil

        sent, self._sent = self._sent, psutil.net_io_counters(nowrap=False)
        found = {"cpu_share": psutil.cpu_percent() / 100}
        if sent is not None and self._sent is not None:
            found["sent_bytes_s"] = max(0.0, self._sent.bytes_sent - sent.bytes_sent) / self._every_s
        return found | self._of_devices()

    def _of_devices(self) -> dict[str, float]:
        shares, used = [], []
        for device in self._devices:
            with suppress(self._nvml.NVMLError):
                shares.append(self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
            with suppress(self._nvml.NVMLError):
                used.append(float(self._nvml.nvmlDeviceGetMemoryInfo(device).used))
        share = {"device_share": sum(shares) / len(shares)} if shares else {}
        return share | ({"device_bytes": max(used)} if used else {})


def load_nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def find_device_handles(nvml: Any, ranks: int, environ: Mapping[str, str]) -> list[Any]:
    """Return the devices of so many ranks: the first of those that CUDA can see. NVML itself sees all."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    found: list[Any] = []
    with suppress(nvml.NVMLError, ValueError):
        named = visible.split(",") if visible is not None else list(map(str, range(nvml.nvmlDeviceGetCount())))
        for name in named[:ranks]:
            by_number = name.strip().isdigit()
            get = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
            found.append(get(int(name) if by_number else name.strip()))
    return found
