"""What ranks use: what a driver answers is noted, what it does not know is left out, and it is asked rarely."""

import time
from types import SimpleNamespace

import pytest
import torch

from paceline.measurement import progress
from paceline.measurement.progress import UsageSampler
from paceline.runlog import machine
from paceline.runlog.machine import RankUsage, count_network_bytes, find_device_handles


class Driver:
    """Answers as NVML does, for three devices: of none it tells the power, of the second not how busy it is."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 2:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        if name != "GPU-b":
            raise self.NVMLError
        return 1

    def nvmlDeviceGetUtilizationRates(self, device):
        if device == 1:
            raise self.NVMLError
        return SimpleNamespace(gpu=80)

    def nvmlDeviceGetPowerUsage(self, device):
        raise self.NVMLError

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=(device + 1) * 10**9)


@pytest.mark.parametrize(
    ("ranks", "visible", "found"),
    [(2, None, [0, 1]), (8, None, [0, 1, 2]), (1, "2,0", [2]), (2, "GPU-b, 0", [1, 0]), (1, "", []), (2, "1,7", [1])],
)
def test_the_devices_of_the_ranks_are_asked_and_no_others(ranks, visible, found):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find_device_handles(Driver(), ranks, environ) == found


def test_shares_are_means_and_bytes_are_peaks_of_the_time_asked_for(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(progress, "load_nvml", Driver)
    taken = UsageSampler(ranks=2)
    assert taken._sample_devices() == {"device_share": 0.8, "device_bytes": 2e9}
    taken._samples = [(t, {"device_share": s, "device_bytes": b}) for t, s, b in ((1, 0, 9), (2, 0.5, 3), (3, 1, 2))]
    both, later = {"device_share": 0.75, "device_bytes": 3}, {"began": 4, "ended": 5, "device": "NVIDIA H200"}
    assert taken.during(SimpleNamespace(began=2, ended=3, device="NVIDIA H200")) == both
    assert taken.during(SimpleNamespace(began=2, ended=3, device=None)) == {}
    assert taken.during(SimpleNamespace(**later)) == {}
    monkeypatch.setattr(progress, "load_nvml", lambda: None)
    assert UsageSampler()._sample_devices() == {}


def test_what_the_driver_knows_is_noted_and_asked_rarely():
    used = RankUsage("b", Driver())
    found = used.now()
    assert found["device_bytes"] == 2e9
    assert not {"device_watts", "device_share"} & found.keys()
    assert used.now() == {}


def test_a_process_on_cores_is_noted_too(monkeypatch):
    monkeypatch.setattr(machine, "EVERY_S", 0.0)
    used = RankUsage.of(torch.device("cpu"))
    assert used.now().keys() == {"resident_bytes"}, "rates take two looks"
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    found = used.now()
    assert found["resident_bytes"] > 1e6
    assert 0 < found["cores"] < 2
    assert found["network_bytes_s"] >= 0


def test_the_network_is_what_all_interfaces_and_infiniband_count(tmp_path):
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text(f"{10**15}\n")
    assert 4e15 <= count_network_bytes(tmp_path) < 4.1e15
