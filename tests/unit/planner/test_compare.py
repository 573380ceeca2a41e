"""Several clusters in one table: each number is that of its own plan, and one is recommended."""

import json
from pathlib import Path

import pytest

from paceline.planner.compare import Comparison
from paceline.planner.plan import plan
from paceline.planner.rows import Requirements
from plan_specs import lm

RECIPE = str(Path(__file__).resolve().parents[3] / "recipes" / "lm_7b.yaml")
CLUSTERS = ("1xH100", "4xH100", "8xA100-40GB")
LM = lm("gpt2", 64, 512, 50257, train={"steps": 500})


def compared(*clusters, **more):
    return Comparison(tuple(plan(LM, name, [int(name[0])], samples=6400, **more) for name in clusters))


def test_every_number_is_that_of_its_own_plan():
    found = compared(*CLUSTERS)
    for entry, values in zip(found.clusters, found.table(), strict=True):
        row = entry.plan.rows[0]
        assert (values["cluster"], values["devices"]) == (entry.cluster, row.devices)
        assert values["epoch_s"] == pytest.approx(100 * row.price.step_s)
        assert values["usd_per_hour"] == pytest.approx(entry.plan.rates.usd * row.devices)
        assert values["cost_usd"] == pytest.approx(values["usd_per_hour"] * values["hours"])
        assert 0 < values["utilisation"] < 1
    assert min(values["relative_cost"] for values in found.table()) == 1
    assert found.fastest.row.run_s == min(entry.row.run_s for entry in found.clusters)


@pytest.mark.parametrize(
    ("requirements", "name"), [(Requirements(), "4xH100"), (Requirements(deadline_h=100), "1xH100")]
)
def test_one_is_recommended(requirements, name):
    found = compared(*CLUSTERS, requirements=requirements)
    assert found.chosen.cluster == name
    assert found.verdict(found.clusters[2]) == "no advantage"
    assert name in found.headline


def test_what_does_not_fit_or_has_no_price_is_listed(ask):
    found = compared("1xH100", "4xA10")
    assert not found.priced
    assert found.table()[1]["cost_usd"] is None
    found = ask("plan", RECIPE, "--cluster", "1xH100", "--cluster", "4xH100", "--json")
    assert found.code == 0
    values = json.loads(found.out)
    assert [row["cluster"] for row in values["clusters"]] == ["1xH100", "4xH100"]
    assert values["chosen"] == "4xH100"
