"""The page in a real browser: no error, charts drawn, light and dark, a phone, print. The article in a real TeX."""

import shutil
import subprocess
from contextlib import contextmanager

import pytest

from paceline.reports.report import report
from report_runs import make_measurement

CHARTS = 8
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = make_measurement(tmp_path_factory.mktemp("runs") / "docstrings-measure")
    return report([folder], tmp_path_factory.mktemp("report"))


@contextmanager
def opened(browser, made, width=1100, height=900, scheme="light"):
    """The page, which must not complain about anything."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    context.set_default_timeout(PATIENCE_MS)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(request.url))
    page.goto(made.page.as_uri())
    page.wait_for_selector(f"html[data-drawn='{CHARTS}']")
    yield page
    context.close()
    assert said == []


COLOURS = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const found = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 200) found.add((data[i] << 16) + (data[i + 1] << 8) + data[i + 2]);
  }
  return found.size;
})"""
INSIDE = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const [chart, card] = [canvas, canvas.closest("section")].map((one) => one.getBoundingClientRect());
  const caption = canvas.closest("section").querySelector(".caption").getBoundingClientRect();
  return chart.height > 80 && chart.height < 600 && chart.right <= card.right && chart.bottom <= caption.top;
})"""
WIDTHS = "() => [document.documentElement.scrollWidth, window.innerWidth]"
BACK = "() => getComputedStyle(document.body).backgroundColor"


def test_charts_are_drawn_without_a_complaint(browser, made):
    with opened(browser, made) as page:
        assert page.locator("canvas").count() == CHARTS
        assert all(colours > 20 for colours in page.evaluate(COLOURS))
        assert page.locator("#verdict .first").inner_text() == made.contents.verdict[0]
        assert page.locator("tr.chosen").count() >= 3


def test_a_point_tells_its_file_and_line(browser, made):
    with opened(browser, made) as page:
        told = page.evaluate(
            """() => {
              const chart = Chart.getChart(document.querySelector('canvas[data-exhibit="loss"]'));
              chart.tooltip.setActiveElements([{ datasetIndex: 0, index: 3 }], { x: 10, y: 10 });
              chart.update();
              return chart.tooltip.body[0].after[0];
            }"""
        )
        assert "events/rank0.jsonl line 5" in told


def test_dark_and_back(browser, made):
    with opened(browser, made, scheme="dark") as page:
        dark = page.evaluate(BACK)
        page.locator("#theme").click()
        light = page.evaluate(BACK)
        assert (dark, light) == ("rgb(11, 17, 32)", "rgb(248, 250, 252)")
        assert all(colours > 20 for colours in page.evaluate(COLOURS))


def test_on_a_phone_nothing_sticks_out(browser, made):
    with opened(browser, made, width=360, height=740) as page:
        inside, window = page.evaluate(WIDTHS)
        assert inside <= window
        assert all(colours > 20 for colours in page.evaluate(COLOURS))


def test_print_is_light_and_complete(browser, made, tmp_path):
    with opened(browser, made, scheme="dark") as page:
        page.emulate_media(media="print")
        page.wait_for_selector("html[data-theme='light']")
        assert page.evaluate(INSIDE) == [True] * CHARTS  # not over what comes after them
        assert page.locator("summary:visible").count() == 0
        printed = page.pdf(format="A4")
        assert printed.startswith(b"%PDF")
        assert len(printed) > 20_000
        page.emulate_media(media="screen")
        page.wait_for_selector("html[data-theme='dark']")
        assert page.locator("details[open]").count() == 0
        assert page.evaluate(INSIDE) == [True] * CHARTS


def test_the_article_compiles(made, tmp_path):
    if shutil.which("pdflatex") is None:
        pytest.skip("there is no TeX here: pdflatex is not installed")
    folder = tmp_path / "article"
    shutil.copytree(made.folder, folder)
    for _ in range(2):
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"],
            cwd=folder, capture_output=True, text=True, errors="replace", timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-1500:]
    assert "Undefined control sequence" not in done.stdout
    assert (folder / "report.pdf").stat().st_size > 30_000
