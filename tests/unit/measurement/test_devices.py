"""Devices of a measurement: a driver's names in the catalogue, the share of the peak, and what the plan is of."""

from dataclasses import replace

import pytest

from paceline.config import build_spec
from paceline.hardware.catalogue import load_catalogue, match_driver_name
from paceline.measurement.result import add_mfu, compare_with_plan
from paceline.measurement.rows import MeasuredRow, Resources
from paceline.measurement.run_times import StepParts, find_cuda_device
from paceline.measurement.tables import build_times_table
from paceline.planner.cost_model import build_cost_model
from paceline.planner.plan import plan
from results import render_text

NAMES = {
    "NVIDIA H200": "H200-SXM-141GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA GH200 480GB": "GH200-96GB",
}
OTHERS = ("NVIDIA H100 NVL", "Tesla V100-PCIE-16GB", "NVIDIA A10G", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GB200", "")


@pytest.mark.parametrize(("name", "device"), [*NAMES.items(), *((name, None) for name in OTHERS)])
def test_a_driver_s_name_finds_the_device_and_one_that_is_only_like_it_finds_none(name, device):
    assert match_driver_name(name) == (load_catalogue()[device] if device else None)


@pytest.fixture
def lm(monkeypatch):
    monkeypatch.setattr("paceline.planner.target.list_gpu_names", list)
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
    for row, precision in ((on(None), "bf16"), (on("NVIDIA H100 NVL"), "bf16"), (ROW, "fp64")):
        assert mfu_of(row, lm.replace({"train.precision": precision})) is None
    assert mfu_of(replace(ROW, fits=True), lm) is None


def test_a_run_on_a_device_that_the_planner_cannot_see_is_planned_on_that_device(lm):
    specs = {ROW.label: lm.replace({"train.global_batch": 4096})}
    (on_device,), (on_cores,) = (compare_with_plan([on(device)], specs) for device in ("NVIDIA H200", None))
    assert on_device.step_s < on_cores.step_s / 10


def test_planned_memory_is_what_the_peak_is_measured_of(lm):
    """Of the whole process on cores; without the driver and what lies between allocations on a device."""
    for device, where in (("NVIDIA H200", "1xH200"), (None, "local")):
        (planned,) = compare_with_plan([on(device)], {ROW.label: lm})
        memory = plan(lm.replace({"cluster": where}), where, [1]).rows[0].price.memory
        assert planned.memory_bytes == (memory.allocated_bytes if device else memory.total_bytes)
        assert memory.allocated_bytes < memory.total_bytes


def test_the_device_is_read_from_the_start_of_the_run():
    assert find_cuda_device({"device": "cuda:1", "gpus": ["NVIDIA H200", "NVIDIA L4"]}) == "NVIDIA L4"
    for start in ({"device": "cuda:0", "gpus": []}, {"device": "cpu", "gpus": ["NVIDIA H200"]}, {}):
        assert find_cuda_device(start) is None


def test_the_table_of_times_has_the_devices_and_fits_the_terminal():
    used = Resources(None, "NVIDIA H100 80GB HBM3", 0.0123, {"device_share": 0.9, "device_bytes": 4e9})
    table = build_times_table([replace(ROW, label="fsdp:2+tensor:2+pipeline:2", resources=used), on(None)])
    assert "NVIDIA H100 80GB HBM3" in table.note
    text = render_text(table)
    assert all(word in text for word in ("1.23 %", "90 %", "4 GB"))
    assert max(map(len, text.splitlines())) <= 100
