"""Measuring on a CUDA device: the share of its peak, how busy it is and what it holds, in the file and on the page."""

import json

import pytest
import torch

from paceline import measure
from paceline.cli.measure import render_measurement
from paceline.measurement.run_times import select_steady_steps
from paceline.reports.charts import build_charts
from paceline.reports.contents import gather_contents
from paceline.reports.page import render_page
from paceline.reports.report import build_tables
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from results import render_text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPE = {"width": 512, "heads": 8, "kv_heads": 8, "layers": 6, "ffn": 1536}
SEQUENCE, VOCAB = 256, 512


@pytest.fixture(scope="module")
def measured(tiny_lm, tmp_path_factory):
    """Some seconds of steps: NVML looks a few times a second."""
    larger = {f"model.{name}": value for name, value in SHAPE.items()}
    half = {"train.precision": "bf16", "train.compile": "off", "train.global_batch": 32}
    spec = tiny_lm.replace({**larger, **half, "data.sequence": SEQUENCE, "data.vocab": VOCAB})
    return measure(spec, [1], repeats=1, steps=300, out=tmp_path_factory.mktemp("measured"))


def test_the_device_is_known_and_used(measured):
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    (row,) = measured.rows
    used = row.resources
    print(f"{used.device}: MFU {used.mfu}, {used.usage}, {row.loads.peak_bytes_per_rank}, step {row.step_s}")
    assert used.device == torch.cuda.get_device_name()
    assert 0 < used.mfu < 1
    assert 0 < used.usage["device_share"] <= 1
    assert used.usage["device_bytes"] >= row.loads.peak_bytes_per_rank[0] > 0
    (kept,) = json.loads(measured.file.read_text())["rows"]
    assert (kept["mfu"], kept["usage"], kept["device"]) == (used.mfu, used.usage, used.device)


def test_mfu_is_arithmetic_over_time(measured):
    (row,) = measured.rows
    width, layers = SHAPE["width"], SHAPE["layers"]
    weights = layers * (4 * width**2 + 3 * width * SHAPE["ffn"]) + VOCAB * width
    flops_per_token = 6 * weights + 12 * layers * width * SEQUENCE
    if row.resources.device == "NVIDIA H200":
        assert row.resources.mfu == pytest.approx(flops_per_token * row.tokens_per_s / 989e12, rel=0.02)


def test_the_plan_is_of_the_device(measured):
    """Of a CUDA device, not of the cores around it: those would take hundreds of times as long."""
    (row,), (plan,) = measured.rows, measured.planned
    assert plan.step_s < 10 * row.step_s


def test_the_times_add_up(measured):
    (row,) = measured.rows
    for step in select_steady_steps(read_steps(RunDir(measured.folder / row.runs[0]).events_file(0))):
        assert step["data_s"] + step["compute_s"] + step["exposed_s"] == pytest.approx(step["step_s"], rel=1e-3)
    assert row.parts.comm_s == 0


def test_terminal_and_page_show_them(measured, tmp_path):
    contents = gather_contents([measured.folder])
    html = render_page(contents, build_charts(contents), build_tables(contents))
    for text in (render_text(*render_measurement(measured, verbose=True)), html):
        assert torch.cuda.get_device_name() in text
        assert "MFU" in text
        assert "busy" in text
