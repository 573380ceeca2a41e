"""The price of a round of trees, and when more ranks do not pay."""

from paceline.config import build_spec
from paceline.planner.cost_model import split_rows
from paceline.planner.plan import plan
from paceline.planner.target import resolve_target
from paceline.workloads.trees.planning import build_trees_cost_model


def spec(**given):
    return build_spec({"workload": "trees", "train": {"steps": 50}}).replace(given)


def seconds(rows, ranks=1, **given):
    where = resolve_target("4xCPU").at(ranks)
    return build_trees_cost_model(spec(**given), rows, None).price(split_rows(rows, ranks), where).time


def test_a_round_grows_with_rows_columns_and_levels():
    one = seconds(100_000).step_s
    assert 1.9 < seconds(40_000_000).step_s / seconds(20_000_000).step_s < 2.1
    assert seconds(1_000_000).step_s / seconds(500_000).step_s > 2.2, "the longer one is not in the cache"
    assert one < seconds(100_000, **{"data.columns": 48}).step_s
    assert one < seconds(100_000, **{"model.max_depth": 9}).step_s


def test_two_ranks_pay_on_long_tables_alone():
    assert seconds(5_000, 2).step_s > seconds(5_000).step_s
    assert seconds(5_000_000, 2).step_s < 0.7 * seconds(5_000_000).step_s
    assert seconds(5_000, 2).exposed_s > 0


def test_a_plan_reads_the_table_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.planner.target._read_calibration_if_any", lambda file: None)  # of this machine
    found = plan(spec(**{"data.rows": 2000, "data.cache": str(tmp_path)}))
    assert found.cost_model.headline().endswith("12 columns, 50 rounds of 6 levels")
    assert found.chosen.devices == 1
    assert "Stay on one rank" in " ".join(found.advice) or found.rows[-1].devices == 1
