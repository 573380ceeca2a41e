"""The lessons compute what the planner computes, in a real browser, and their exercises have solutions that run."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import Train
from paceline.measurement.scaling_laws import LAWS
from paceline.planner.formulas.memory import _states
from paceline.planner.formulas.placement import DTYPE_SIZES, GPU_PHYSICS, Placement
from paceline.planner.formulas.step_time import CommGroup, all_reduce_s, exposed_s
from paceline.trainer.optim.schedule import build_schedule

DOCS = Path(__file__).resolve().parents[2] / "docs"
LESSONS = sorted(
    {name for page in DOCS.glob("learn/*.md") for name in re.findall(r'data-lesson="(\w+)"', page.read_text())}
)
PRECISIONS = {
    "fp32": "fp32",
    "bf16 by autocast": "amp_bf16",
    "bf16 with fp32 master weights": "bf16",
    "pure bf16": "pure_bf16",
}
SETTINGS = 200
SAMPLES = 10**12  # of a run: so many that a share of it is a number of samples


@pytest.fixture(scope="module")
def page(browser):
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    boxes = "".join(f'<div data-lesson="{name}"></div>' for name in LESSONS)
    style, script = ((DOCS / "assets" / f"lessons.{kind}").read_text() for kind in ("css", "js"))
    tab.set_content(f"<style>{style}</style>{boxes}<script>{script}</script>")
    return tab


def all_reduce(n: int, size: float, bytes_s: float) -> float:
    hop = GPU_PHYSICS.link_latency_s
    return all_reduce_s(size, CommGroup(n, n, 1, bytes_s, hop, math.log2(max(n, 2)) * hop), GPU_PHYSICS)


def test_formulas_are_those_of_the_planner(page):
    draw = random.Random(0)
    for _ in range(SETTINGS):
        n, size, bytes_s = draw.randint(1, 1024), 10 ** draw.uniform(4, 11), 10 ** draw.uniform(8, 12)
        assert page.evaluate("a => lessons.allReduce(...a)", [n, size, bytes_s]) == pytest.approx(
            all_reduce(n, size, bytes_s)
        )
        compute = 10 ** draw.uniform(-3, 1)
        comm = all_reduce(n, size, bytes_s)
        step = compute / n + exposed_s(comm, compute / n, GPU_PHYSICS)
        assert page.evaluate("a => lessons.step(...a).step", [n, compute, size, bytes_s]) == pytest.approx(step)
        params, stage, precision = 10 ** draw.uniform(7, 11), draw.randint(0, 3), draw.choice(sorted(PRECISIONS))
        placement = Placement(shard=n if stage else 1, replicate=1 if stage else n, zero=stage, micro_batch=1)
        expected = _states(params, params, 0.0, placement, DTYPE_SIZES[PRECISIONS[precision]])[:3]
        got = page.evaluate("a => lessons.states(...a)", [params, n, stage, precision])
        assert got == pytest.approx(expected)
        serial = draw.random()
        for law in ("amdahl", "gustafson"):
            expected = LAWS[law].speedup({"serial": serial}, n)
            assert page.evaluate(f"a => lessons.{law}(...a)", [serial, n]) == pytest.approx(expected)
        stages, passes = draw.randint(1, 64), draw.randint(1, 256)
        bubble_s, busy_s = stages - 1, passes  # in turns of one micro-batch
        assert page.evaluate("a => lessons.bubble(...a)", [stages, passes]) == pytest.approx(
            bubble_s / (busy_s + bubble_s)
        )
        batch, scaling = draw.choice([32, 256, 4096]), draw.choice(["none", "linear", "sqrt"])
        schedule, warmup, share = draw.choice(["constant", "linear", "cosine"]), draw.choice([0, 0.3]), draw.random()
        train = Train(lr=0.1, global_batch=batch, base_batch=256, lr_scaling=scaling, schedule=schedule, warmup=warmup)
        expected = build_schedule(train.model_copy(update={"final_lr": 0.0}), SAMPLES)(round(share * SAMPLES))
        got = page.evaluate("a => lessons.learningRate(...a)", [0.1, batch / 256, scaling, schedule, warmup, share])
        assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_answers_to_the_keyboard(page, name):
    box = page.locator(f'[data-lesson="{name}"]')
    assert box.locator("svg").count() == 1
    before = box.locator(".answer").inner_text(), box.locator("svg").inner_html()
    slider = box.locator("input").first
    slider.focus()
    slider.press("ArrowRight")
    after = box.locator(".answer").inner_text(), box.locator("svg").inner_html()
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_after_its_last_step_every_rank_of_the_ring_has_the_sum(page):
    box = page.locator('[data-lesson="ring"]')
    box.locator("input").last.evaluate("input => { input.value = 14; input.dispatchEvent(new Event('input')); }")
    shares = [text for text in box.locator("svg text").all_text_contents() if "/" in text]
    assert shares
    assert all(share.split("/")[0] == share.split("/")[1] for share in shares)


def test_the_slides_turn_by_keys_and_none_is_cut(browser):
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto((DOCS / "learn" / "slides.html").as_uri())
    count = tab.locator("section").count()
    assert count >= 20
    for number in range(1, count + 1):
        assert tab.locator("#at").inner_text() == f"{number} / {count}"
        assert tab.locator("section.shown").count() == 1
        assert tab.evaluate("document.documentElement.scrollHeight") <= 800, number
        assert tab.evaluate("document.documentElement.scrollWidth") <= 1280, number
        tab.keyboard.press("ArrowRight")
    assert tab.locator("section [data-lesson] svg").count() == len(LESSONS)


def test_the_lessons_are_small():
    assert sum((DOCS / "assets" / f"lessons.{kind}").stat().st_size for kind in ("css", "js")) < 200_000


def test_the_exercise_on_ranks_ends_with_the_loss_of_one():
    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, timeout=240).stdout

    examples = DOCS / "examples" / "learn"
    alone = run(sys.executable, str(examples / "single.py"))
    ranks = run(
        sys.executable, "-m", "paceline", "launch", "--ranks", "2", "--", sys.executable, str(examples / "ddp.py")
    )
    assert re.fullmatch(r"loss 0\.\d{6}\n", alone)
    assert alone in ranks  # its exit code may be an abort: gloo's threads outlive the interpreter at times
