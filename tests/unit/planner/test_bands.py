"""Bands: what was measured about them, which one a layout has, and the verdict that follows."""

from dataclasses import replace

import pytest

from paceline.layout import Layout
from paceline.planner.candidates import ALL, UNKNOWN, load_bands
from paceline.planner.plan import plan
from paceline.planner.show import summarize_plan
from paceline.planner.target import resolve_target
from plan_specs import lm

FIXED = {"strategy": "single", "micro_batch": 1, "activation_checkpointing": "none"}


@pytest.mark.parametrize("quantity", ["memory", "time"])
def test_nine_in_ten_rows_that_were_left_out_lie_inside(quantity):
    bands = load_bands()
    assert bands[quantity, ALL].coverage >= 0.9
    assert bands[quantity, ALL].families >= 5
    widest = bands[quantity, UNKNOWN]
    for (of, _), band in bands.items():
        assert band.low < 1 < band.high
        assert of != quantity or widest.low <= band.low < band.high <= widest.high


@pytest.mark.parametrize(
    ("layout", "device", "situation"),
    [
        (Layout("single", 1, 8, 8), "H100", "single"),
        (Layout("ddp", 4, 8, 2), "H100", "replicated"),
        (Layout("zero1", 1, 8, 2, 4), "H100", "replicated"),
        (Layout("fsdp", 1, 8, 2, 4), "H100", "sharded"),
        (Layout("fsdp", 1, 8, 2, 4, tensor=2), "H100", "tensor"),
        (Layout("fsdp", 1, 8, 2, 4, tensor=2, pipeline=2), "H100", "pipeline"),
        (Layout("fsdp", 1, 8, 2, 4, offload=True), "H100", UNKNOWN),
        (Layout("ddp", 4, 8, 2), "CPU", UNKNOWN),
    ],
)
def test_a_layout_has_the_band_of_its_situation(layout, device, situation):
    price = plan(lm("1b", 8, 1024, parallel=FIXED), "1xH100").chosen.price
    found = replace(price, layout=layout, where=resolve_target(f"1x1x{device}").at(1)).find_band("time")
    assert found.situation == situation


@pytest.mark.parametrize(("factor", "verdict"), [(1.6, "lm fits"), (1.1, "lm may not fit"), (0.3, "lm does not fit")])
def test_what_fits_by_its_estimate_alone_may_not_fit(tmp_path, factor, verdict):
    spec = lm("1b", 8, 1024, parallel=FIXED)
    need = plan(spec, "1xH100").chosen.price.memory.total_bytes / 1e9
    (tmp_path / "lab.yaml").write_text(f"device: H100\nmemory_gb: {need * factor}\nhost_memory_gb: 1\n")
    found = plan(spec, str(tmp_path / "lab.yaml"))
    assert summarize_plan(found).startswith(verdict)
    assert found.fits == (factor > 1)
    if found.fits:
        assert found.chosen.price.tight == (factor < 1.4)
        low, high = found.chosen.hours_band
        assert low < found.chosen.hours < high


def test_the_search_prefers_what_surely_fits():
    found = plan(lm("1b", 64, 1024), "1xA100-40GB").chosen.price
    assert not found.tight
    assert found.memory_band_bytes[1] <= found.capacity_bytes
