"""Use of a device: what a driver answers is noted, what it does not know is left out, and it is asked rarely."""

from types import SimpleNamespace

import torch

from paceline.record import device_use
from paceline.record.device_use import DeviceUse


class Driver:
    """Answers as NVML does; it cannot tell the power."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234"
        return uuid

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetPowerUsage(self, device):
        raise self.NVMLError

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=3 << 30)


def test_what_the_driver_knows_is_noted_and_asked_rarely(monkeypatch):
    used = DeviceUse("1234", Driver())
    assert used.now() == {"device_share": 0.87, "device_bytes": float(3 << 30)}
    assert used.now() == {}
    monkeypatch.setattr(device_use, "EVERY_S", 0.0)
    assert used.now()


def test_nothing_is_noted_where_there_is_no_device_or_no_driver():
    assert DeviceUse.of(torch.device("cpu")).now() == {}
    assert DeviceUse("1234").now() == {}
