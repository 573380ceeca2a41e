"""A kind of work that the planner has never heard of: all that it needs are the answers of a subject."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.planner import plan as planner
from paceline.planner.candidates import PricedLayout
from paceline.planner.cost_model import PassCostModel, rows_per_rank, split_rows
from paceline.planner.emit import build_launch_files
from paceline.planner.formulas.memory import DeviceMemory
from paceline.planner.formulas.placement import DTYPE_SIZES
from paceline.planner.formulas.step_time import StepTime
from paceline.planner.show import render_plan
from results import render_text


@dataclass(frozen=True)
class RowsMemory(DeviceMemory):
    rows_bytes: float
    terms: ClassVar[Mapping[str, str]] = {"rows_bytes": "rows"}


@dataclass(frozen=True, kw_only=True)
class Sums(PassCostModel):
    """Adds up numbers: a pass reads eight bytes of each row."""

    model: ClassVar[str] = "a sum"
    params = 1.0
    flops_per_sample = 1.0

    def headline(self):
        return f"{self.global_batch:,} rows"

    def layout_name(self, price):
        return f"{rows_per_rank(price.layout):,} rows each"

    def memory(self, layout, where):
        return RowsMemory(8.0 * rows_per_rank(layout))

    def price(self, layout, where):
        memory = self.memory(layout, where)
        seconds = memory.rows_bytes / where.cluster.device.bandwidth_bytes_s
        return PricedLayout(layout, where, StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), memory)

    def advice(self, plan):
        yield f"take {plan.chosen.devices}"


def planned(monkeypatch, rows, cluster):
    cost_model = Sums(name="sums", workload="sums", global_batch=rows, numbers=DTYPE_SIZES["fp32"], steps=3)
    monkeypatch.setattr(planner, "build_cost_model", lambda *_: cost_model)
    return planner.plan(build_spec({"name": "sums"}), cluster)


def test_it_is_planned_shown_and_written(monkeypatch):
    found = planned(monkeypatch, 1_000_000_000, "4xA100")
    assert [row.speedup for row in found.rows] == pytest.approx([1, 2, 4])
    assert found.overrides() == {"parallel.ranks": 4}
    assert found.advice == ("take 4",)
    assert found.as_json()["rows"][0]["memory"]["rows_bytes"] == 8e9
    text = render_text(*render_plan(found, verbose=True))
    assert "250,000,000 rows each" in text
    assert "time per pass" in text
    assert "rule of thumb" not in text


def test_engines_that_send_gradients_are_refused(monkeypatch, tmp_path):
    found = planned(monkeypatch, 1000, "2xA100")
    with pytest.raises(UserError, match="a sum has no gradients"):
        build_launch_files(found, tmp_path / "run.yaml", "deepspeed")


def test_what_does_not_fit_is_refused_by_its_term(monkeypatch):
    found = planned(monkeypatch, 100_000_000_000, "4xA100")
    assert not found.fits
    assert "rows 120 GB over" in found.advice[0]


def test_ranks_divide_rows():
    layout = split_rows(10, 3)
    assert (layout.ranks, rows_per_rank(layout), layout.passes(10)) == (3, 4, 1)
