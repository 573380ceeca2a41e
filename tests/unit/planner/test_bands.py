"""Bands: what was measured about them, which one a layout has, and the verdict that follows."""

import pytest

from paceline.layout import Layout
from paceline.planner.bands import ALL, UNKNOWN, find_band, load_bands
from paceline.planner.plan import plan
from paceline.planner.show import summarize_plan
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
    ("layout", "known", "situation"),
    [
        (Layout("single", 1, 8, 8), True, "single"),
        (Layout("ddp", 4, 8, 2), True, "replicated"),
        (Layout("zero1", 1, 8, 2, 4), True, "replicated"),
        (Layout("fsdp", 1, 8, 2, 4), True, "sharded"),
        (Layout("fsdp", 1, 8, 2, 4, tensor=2), True, "tensor"),
        (Layout("fsdp", 1, 8, 2, 4, tensor=2, pipeline=2), True, "pipeline"),
        (Layout("fsdp", 1, 8, 2, 4, offload=True), True, UNKNOWN),
        (Layout("ddp", 4, 8, 2), False, UNKNOWN),
    ],
)
def test_a_layout_has_the_band_of_its_situation(layout, known, situation):
    assert find_band("time", layout, known).situation == situation


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
