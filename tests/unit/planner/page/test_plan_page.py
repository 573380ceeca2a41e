"""The page in a real browser: every number that a slider leads to is the one that Python plans for that setting."""

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest

import paceline
from paceline.planner.page.page import DEADLINES_H, build_axes, render_plan_page, setting_overrides
from paceline.planner.plan import plan
from paceline.planner.rows import Requirements, RowRanking
from paceline.planner.show import format_cell_amount

PATIENCE_MS = 120_000
RECIPES = Path(__file__).resolve().parents[4] / "recipes"
PRICE = 3.29
SETTINGS = 200
FIXED = ["parallel.strategy=ddp", "parallel.activation_checkpointing=none"]


def plan_at(spec, devices=(), cluster="2x4xA10", price=PRICE):
    return plan(spec, cluster, devices, price)


@pytest.fixture(scope="module")
def planned():
    return plan_at(paceline.load(RECIPES / "lm_gpt2.yaml", FIXED), (1, 2, 4, 8))


@pytest.fixture(scope="module")
def file(planned, tmp_path_factory):
    made = tmp_path_factory.mktemp("page") / "plan.html"
    made.write_text(render_plan_page([planned], plan_at, ["paceline", "plan", "lm.yaml"]), encoding="utf-8")
    return made


def opened(browser, file, width=1100, scheme="light"):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    context.set_default_timeout(PATIENCE_MS)
    shown, messages = context.new_page(), []
    shown.on("console", lambda message: messages.append(message.text))
    shown.on("pageerror", lambda error: messages.append(str(error)))
    shown.goto(file.as_uri())
    shown.wait_for_selector("html[data-drawn]")
    return shown, messages


READ = """(settings) => settings.map((setting) => {
  for (const [name, value] of Object.entries(setting)) {
    const slider = document.getElementById(`set-${name}`);
    if (Number(slider.value) === value) continue;
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
  }
  const text = (id) => document.getElementById(id).textContent;
  return {
    rows: [...document.querySelectorAll("tr[data-step]")].map((row) => ({
      devices: Number(row.dataset.devices), step_s: Number(row.dataset.step), bytes: Number(row.dataset.bytes),
      usd: Number(row.dataset.usd), chosen: row.classList.contains("chosen"), verdict: row.lastChild.textContent,
    })),
    ...Object.fromEntries(["money", "long", "fit", "impossible", "command", "reasons"].map((id) => [id, text(id)])),
  };
})"""


def test_every_number_is_the_one_that_python_plans(browser, planned, file):
    axes, chance = build_axes(planned), random.Random(3)
    shown, messages = opened(browser, file)
    positions = {axis.name: range(len(axis.values)) for axis in axes}
    positions |= {"devices": range(4), "deadline": range(len(DEADLINES_H) + 1), "price": range(1, 10)}
    picked = [{name: chance.choice(values) for name, values in positions.items()}]
    while len(picked) < SETTINGS:  # two sliders at a time
        moved = {name: chance.choice(positions[name]) for name in chance.sample(list(positions), 2)}
        picked.append({**picked[-1], **moved})
    found = shown.evaluate(READ, picked)
    assert messages == []

    @cache
    def python(values):
        try:
            return plan_at(planned.spec.replace(setting_overrides(planned, axes, values)), (1, 2, 4, 8))
        except paceline.UserError as error:
            return str(error)

    kinds = set()
    for setting, seen in zip(picked, found, strict=True):
        values = tuple(axis.values[setting[axis.name]] for axis in axes)
        expected = python(values)
        if isinstance(expected, str):
            assert expected in seen["impossible"]
            kinds.add("impossible")
            continue
        hours = DEADLINES_H[setting["deadline"]] if setting["deadline"] < len(DEADLINES_H) else None
        ranking = RowRanking(expected.rows, Requirements(deadline_h=hours))
        price, n = setting["price"], (1, 2, 4, 8)[setting["devices"]]
        assert [row["devices"] for row in seen["rows"]] == [row.devices for row in expected.rows]
        for row, mine in zip(expected.rows, seen["rows"], strict=True):
            assert mine["step_s"] == row.price.step_s
            assert mine["bytes"] == row.price.memory.total_bytes
            assert mine["usd"] == pytest.approx(row.device_hours * price, rel=1e-12)
            assert mine["verdict"] == ranking.verdict(row)
            assert mine["chosen"] == (row is ranking.chosen)
        here = next((row for row in expected.rows if row.devices == n), None)
        assert seen["fit"] == ("No" if here is None else "May not" if here.price.tight else "Yes")
        kinds.add(seen["fit"])
        if here is not None:
            assert seen["money"] == f"{format_cell_amount(here.device_hours * price)} USD"
        else:
            assert next(f for f in expected.misfits if f.devices == n).rejected[0].reason in seen["reasons"]
        assert f"--devices {n}" in seen["command"]
    assert kinds >= {"impossible", "No", "Yes"}


def test_the_command_that_a_page_shows_plans_the_same(browser, planned, file, ask):
    shown, _ = opened(browser, file)
    seen = shown.evaluate(READ, [{"batch": 1, "precision": 1, "devices": 2, "price": 2.5, "deadline": 8}])[0]
    words = seen["command"].replace("paceline plan lm.yaml", str(RECIPES / "lm_gpt2.yaml")).split()
    planned_json = json.loads(ask("plan", *words, *FIXED, "--json").out)
    row = next(row for row in seen["rows"] if row["devices"] == 4)
    assert planned_json["rows"][0]["time"]["step_s"] == row["step_s"]
    assert planned_json["rows"][0]["cost_usd"] == pytest.approx(row["usd"])
    assert planned_json["wishes"]["deadline_h"] == DEADLINES_H[8]


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (390, "dark")])
def test_it_is_drawn_on_every_screen(browser, file, width, scheme):
    shown, messages = opened(browser, file, width, scheme)
    assert messages == []
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for place in ("memory", "time", "front"):
        box = shown.locator(f"#{place} svg").bounding_box()
        assert box["width"] > 200
        assert box["height"] > 15
    dark = shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(11, 17, 32)"
    assert dark == (scheme == "dark")
    shown.emulate_media(media="print")
    assert shown.evaluate("getComputedStyle(document.body).color") == "rgb(31, 41, 55)", "paper is white"


def test_the_page_asks_no_network_and_trusts_no_name(planned):
    words = ["paceline", "plan", "$(rm x)</script><img src=x onerror=alert(1)>.yaml"]
    text = render_plan_page([plan_at(planned.spec, [1])], plan_at, words)
    assert "default-src &#39;none&#39;" in text
    assert not re.search(r"(src|href)=\"?https?:", text)
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "'$(rm x)" in text


def test_a_fit_by_passes_has_no_batch_to_slide(tmp_path, ask):
    out = tmp_path / "plan.html"
    (tmp_path / "topics.yaml").write_text("name: topics\nworkload: topics\ntrain: {steps: 3}\n")
    words = ["--samples", "500", "--tokens", "90", "--cluster", "2xA100", "--deadline", "100h"]
    found = ask("plan", tmp_path / "topics.yaml", *words, "--page", out)
    assert found.code == 0
    assert f"written: {out}" in found.out
    data = json.loads(re.search(r'id="data">(.*)</script>', out.read_text())[1])
    assert data["clusters"][0]["axes"] == []
    assert data["clusters"][0]["devices"] == [1, 2]
    assert 100 in data["deadlines_h"]
    assert "--samples 500 --tokens 90.0" in data["command"]


def test_clusters_stand_side_by_side_and_layouts_can_be_switched(browser, planned, tmp_path):
    plans = [planned, plan_at(planned.spec, (1, 2, 4), "4xH100")]
    file = tmp_path / "two.html"
    file.write_text(render_plan_page(plans, plan_at, ["paceline", "plan", "lm.yaml"]), encoding="utf-8")
    shown, messages = opened(browser, file, 1300)
    first, second = (shown.locator(".panel").nth(place).bounding_box() for place in (0, 1))
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    assert shown.locator("#verdict").inner_text().startswith("4xH100 is the fastest")
    free = plan_at(planned.spec.replace({"parallel": "auto"}), (4,), "4xH100")
    file.write_text(render_plan_page([free], plan_at, ["paceline", "plan", "lm.yaml"]), encoding="utf-8")
    shown.goto(file.as_uri())
    shown.wait_for_selector("html[data-drawn]")
    shown.select_option("#set-layout", label="fsdp")
    other = next(p for p in free.rows[0].found.prices if p.layout.strategy == "fsdp")
    assert float(shown.locator("tr[data-step]").get_attribute("data-step")) == other.step_s
    assert "strategy=fsdp" in shown.locator("#apply").inner_text()
    assert messages == []
