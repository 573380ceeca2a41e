"""What a rank uses: what a driver answers is noted, what it does not know is left out, and it is asked rarely."""

import socket
import time
from types import SimpleNamespace

import pytest
import torch

from paceline.runlog import machine
from paceline.runlog.machine import RankUsage, count_network_bytes


class Driver:
    """Answers as NVML does; it cannot tell the power."""

    class NVMLError(Exception):
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


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(machine, "EVERY_S", 0.0)


def test_what_the_driver_knows_is_noted_and_asked_rarely():
    used = RankUsage("1234", Driver())
    found = used.now()
    assert (found["device_share"], found["device_bytes"]) == (0.87, float(3 << 30))
    assert "device_watts" not in found
    assert used.now() == {}


def test_a_process_on_cores_is_noted_too(at_once):
    used = RankUsage.of(torch.device("cpu"))
    assert used.now().keys() == {"resident_bytes"}, "rates take two looks"
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    found = used.now()
    assert found["resident_bytes"] > 1e6
    assert 0 < found["cores"] < 2
    assert found["network_bytes_s"] >= 0


def test_the_network_is_that_of_the_interface_that_ranks_were_given(tmp_path):
    given = {"GLOO_SOCKET_IFNAME": "lo"}
    before = count_network_bytes(given, tmp_path)
    with socket.socket(type=socket.SOCK_DGRAM) as received, socket.socket(type=socket.SOCK_DGRAM) as sent:
        received.bind(("127.0.0.1", 0))
        sent.sendto(bytes(10_000), received.getsockname())
        received.recv(10_000)
    assert count_network_bytes(given, tmp_path) - before >= 10_000
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("25\n")
    none = {"NCCL_SOCKET_IFNAME": "none0"}
    assert count_network_bytes(none, tmp_path) == 100
