"""Devices of a measurement: a driver's names in the catalogue, the share of the peak, and what NVML is asked."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.config import build_spec
from paceline.hardware.catalogue import load_catalogue, match_driver_name
from paceline.measurement import progress
from paceline.measurement.progress import UsageSampler, select_usage
from paceline.measurement.result import add_mfu, compare_with_plan
from paceline.measurement.rows import MeasuredRow, Resources
from paceline.measurement.run_times import StepParts, find_cuda_device
from paceline.measurement.tables import build_devices_table
from paceline.planner.cost_model import build_cost_model
from paceline.planner.plan import plan
from paceline.runlog.machine import find_device_handles
from results import render_text

NAMES = {
    "NVIDIA H200": "H200-SXM-141GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
    "Tesla T4": "T4",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA GH200 480GB": "GH200-96GB",
}
OTHERS = (
    *("NVIDIA H100 NVL", "Tesla V100-PCIE-16GB", "NVIDIA A10G", "NVIDIA L40", "NVIDIA GeForce RTX 4070"),
    *("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GB200", "NVIDIA Graphics Device", ""),
)


@pytest.mark.parametrize(("name", "device"), [*NAMES.items(), *((name, None) for name in OTHERS)])
def test_a_driver_s_name_finds_the_device_and_one_that_is_only_like_it_finds_none(name, device):
    assert match_driver_name(name) == (load_catalogue()[device] if device else None)


@pytest.fixture
def lm():
    shape = {"preset": "custom", "width": 64, "heads": 4, "kv_heads": 4, "layers": 2, "ffn": 128}
    data, train = {"sequence": 128, "vocab": 512, "limit": 100}, {"global_batch": 8, "precision": "bf16"}
    return build_spec({"workload": "lm", "model": shape, "data": data, "train": train})


H200 = Resources(device="NVIDIA H200")
TIMES = {"step_s": 0.01, "step_s_low": 0.01, "step_s_high": 0.01, "samples_per_s": 1e5}
ROW = MeasuredRow(label="1 rank", ranks=1, **TIMES, parts=StepParts(0.0, 0.01, 0.0, 0.0, 0.0), resources=H200)


def on(device):
    return replace(ROW, resources=replace(H200, device=device))


def mfu_of(row, spec):
    return add_mfu([row], {row.label: spec})[0].resources.mfu


def test_mfu_is_arithmetic_over_the_peak_of_the_device_at_hand(lm):
    whole = build_cost_model(lm).flops_per_sample * 1e5 / 989e12
    assert mfu_of(ROW, lm) == pytest.approx(whole)
    assert mfu_of(replace(ROW, ranks=4), lm) == pytest.approx(whole / 4)
    assert mfu_of(ROW, lm.replace({"train.precision": "fp8"})) == pytest.approx(whole)
    assert mfu_of(ROW, lm.replace({"train.precision": "fp32"})) == pytest.approx(whole * 989 / 67)


def test_without_a_device_or_its_peak_there_is_no_mfu(lm):
    assert mfu_of(on(None), lm) is None
    assert mfu_of(on("NVIDIA H100 NVL"), lm) is None
    assert mfu_of(replace(ROW, fits=True), lm) is None
    assert mfu_of(ROW, lm.replace({"train.precision": "fp64"})) is None


def test_a_run_on_a_device_that_the_planner_cannot_see_is_planned_on_that_device(lm, monkeypatch):
    monkeypatch.setattr("paceline.planner.target.list_gpu_names", list)
    (on_device,), (on_cores,) = (
        compare_with_plan([on(device)], {ROW.label: lm.replace({"train.global_batch": 4096})})
        for device in ("NVIDIA H200", None)
    )
    assert on_device.step_s < on_cores.step_s / 10


def test_planned_memory_is_what_the_peak_is_measured_of(lm, monkeypatch):
    """Of the whole process on cores; without the driver and what lies between allocations on a device."""
    monkeypatch.setattr("paceline.planner.target.list_gpu_names", list)
    for device, where in (("NVIDIA H200", "1xH200"), (None, "local")):
        (planned,) = compare_with_plan([on(device)], {ROW.label: lm})
        memory = plan(lm.replace({"cluster": where}), where, [1]).rows[0].price.memory
        assert planned.memory_bytes == (memory.allocated_bytes if device else memory.total_bytes)
        assert memory.allocated_bytes < memory.total_bytes


def test_the_device_is_read_from_the_start_of_the_run():
    assert find_cuda_device({"device": "cuda:1", "gpus": ["NVIDIA H200", "NVIDIA L4"]}) == "NVIDIA L4"
    assert find_cuda_device({"device": "cuda:0", "gpus": []}) is None
    assert find_cuda_device({"device": "cpu", "gpus": ["NVIDIA H200"]}) is None
    assert find_cuda_device({}) is None


class FakeNvml:
    """Three devices, of which the second does not tell how busy it is."""

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

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=(device + 1) * 10**9)


@pytest.mark.parametrize(
    ("ranks", "visible", "found"),
    [(1, None, [0]), (2, None, [0, 1]), (8, None, [0, 1, 2]), (1, "2,0", [2]), (2, "GPU-b, 0", [1, 0]), (1, "", []),
     (2, "1,7", [1])],
)  # fmt: skip
def test_the_devices_of_the_ranks_are_asked_and_no_others(ranks, visible, found):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find_device_handles(FakeNvml(), ranks, environ) == found


def test_shares_are_means_and_bytes_are_peaks_of_the_time_asked_for(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(progress, "load_nvml", FakeNvml)
    taken = UsageSampler(ranks=2)
    assert taken._sample_devices() == {"device_share": 0.8, "device_bytes": 2e9}
    taken._samples = [(t, {"device_share": s, "device_bytes": b}) for t, s, b in ((1, 0, 9), (2, 0.5, 3), (3, 1, 2))]
    assert taken.between(2, 3) == {"device_share": 0.75, "device_bytes": 3}
    assert taken.between(4, 5) == {}
    for device, usage in ((None, {}), ("NVIDIA H200", {"device_share": 0.5, "device_bytes": 3})):
        assert select_usage(taken, SimpleNamespace(began=2, ended=2.5, device=device)) == usage
    monkeypatch.setattr(progress, "load_nvml", lambda: None)
    assert UsageSampler()._sample_devices() == {}


def test_the_table_of_devices_fits_the_terminal():
    used = Resources(None, "NVIDIA H100 80GB HBM3", 0.0123, {"device_share": 0.9, "device_bytes": 4e9})
    table = build_devices_table([replace(ROW, label="fsdp:2+tensor:2+pipeline:2", resources=used), on(None)])
    lines = render_text(table).splitlines()
    assert len(lines) == 2
    assert all(word in lines[1] for word in ("NVIDIA H100 80GB HBM3", "1.23 %", "90 %", "4 GB"))
