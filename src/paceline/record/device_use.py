"""How busy the device of a rank is, asked of its driver now and then, for the record of a run."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import Any

EVERY_S = 5.0


class DeviceUse:
    """Asked between steps, at most every few seconds: no thread, and nothing where there is no NVIDIA driver."""

    def __init__(self, uuid: str = "", nvml: Any = None) -> None:
        """Of the device with this UUID, as torch knows it; `nvml` is nvidia-ml-py."""
        self._nvml = nvml
        self._device: Any = None
        self._asked = -EVERY_S
        if nvml is not None:
            with suppress(Exception):
                nvml.nvmlInit()
                self._device = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    @classmethod
    def of(cls, device: Any) -> DeviceUse:
        """Of a torch device; of none where it is no CUDA device."""
        if device.type != "cuda":
            return cls()
        with suppress(Exception):
            import pynvml
            import torch

            return cls(str(torch.cuda.get_device_properties(device).uuid), pynvml)
        return cls()

    def now(self) -> dict[str, float]:
        """Share of the time in use, watts and bytes; empty where it was asked a moment ago, or nobody knows."""
        if self._device is None or monotonic() - self._asked < EVERY_S:
            return {}
        self._asked = monotonic()
        found: dict[str, float] = {}
        with suppress(self._nvml.NVMLError):
            found["device_share"] = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100
        with suppress(self._nvml.NVMLError):
            found["device_watts"] = self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1000
        with suppress(self._nvml.NVMLError):
            found["device_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)
        return found
