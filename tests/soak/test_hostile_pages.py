"""Text that would run, in every place that a page shows: a browser executes none of it, and asks no network."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.planning.page.page import page as plan_page
from paceline.planning.plan import plan
from paceline.record.events import EventWriter
from paceline.record.run_dir import RunDir
from paceline.reporting.report import report
from paceline.sweeping.page import write_page
from paceline.sweeping.result import Sweep, TrialRow
from paceline.workloads.topics.pictures.explorer import write_explorer
from report_runs import make_run
from topics_fits import small_fit

EVIL = [
    "<script>window.hit=1</script>",
    "</script><script>window.hit=1</script>",
    "\"><img src=x onerror='window.hit=1'>",
    "javascript:window.hit=1",
    "<a href='javascript:window.hit=1'>x</a>",
    "<svg onload=window.hit=1>",
    "{{ 7*7 }}<iframe src='javascript:parent.hit=1'></iframe>",
    "<link rel=stylesheet href=http://192.0.2.1/x.css><base href=http://192.0.2.1/>",
    "<form action=http://192.0.2.1/><button autofocus>x</button></form><meta http-equiv=refresh content='0;url=/'>",
    r"$\undefined$ <style>@import 'http://192.0.2.1/x.css'</style>",
]
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def hostile_report(folder):
    run = make_run(folder / EVIL[3].replace("/", ""), "made", 2, steps=8)
    text = RunDir(run).spec_file.read_text()
    RunDir(run).spec_file.write_text(text.replace("workload: classifier", f"workload: {json.dumps(''.join(EVIL))}"))
    with EventWriter(run / "events" / "rank0.jsonl") as events:
        for text in EVIL:
            events.write("evaluate", step=8, **{text: 0.5, "metrics": {text: 0.5, "loss": 1.0}})
            events.write("start", host=text, cpu=text, gpus=EVIL, commit=text, device=text, ranks=2)
        events.write("end", status="failed", why="".join(EVIL))
    return report([run], folder / "report", title="".join(EVIL)).page


def hostile_topics(folder):
    X, fit = small_fit(documents=len(EVIL) * 4)
    fit.terms[: len(EVIL)] = EVIL
    fit.names[: len(EVIL)] = EVIL
    return write_explorer(fit, folder / "topics.html", X=X, title="".join(EVIL))


def hostile_plan(folder):
    """Every text that a plan shows: names of the run, the cluster and its devices, assumptions, what was typed."""
    text = "".join(EVIL)

    def ask(spec, devices=()):
        found = plan(spec, "2x4xA10", devices, 3.29)
        device = replace(found.site.whole.device, name=text, source=text, date=text)
        site = replace(found.site, name=text, note=text, whole=replace(found.site.whole, device=device))
        return replace(found, site=site, subject=replace(found.subject, name=text, assumptions=tuple(EVIL)))

    fixed = ["parallel.strategy=ddp", "parallel.checkpointing=none"]
    found = ask(paceline.load(RECIPES / "lm_gpt2.yaml", fixed), (1, 2))
    file = folder / "plan.html"
    file.write_text(plan_page(found, ask, ["paceline", "plan", *EVIL]), encoding="utf-8")
    return file


def hostile_sweep(folder):
    folder = folder / EVIL[0].replace("/", "")
    folder.mkdir()
    values = [{"model.width": 1.0 * number, "model.name": text} for number, text in enumerate(EVIL, 1)]
    done = [TrialRow(number, one, "finished", 0.5, metrics={EVIL[0]: 1.0}) for number, one in enumerate(values, 1)]
    failed = TrialRow(99, values[0], "failed", why="".join(EVIL))
    write_page(Sweep(folder, f"-{EVIL[-1]}", (EVIL[0], *values[0], *EVIL[1:3]), (*map(_every, done), _every(failed))))
    return folder / "sweep.html"


def _every(row):
    """With a value for each key that the sweep says to have."""
    return replace(row, values={**dict.fromkeys(EVIL[:3], "".join(EVIL)), **row.values})


PAGES = {"report": hostile_report, "topics": hostile_topics, "plan": hostile_plan, "sweep": hostile_sweep}


@pytest.fixture(scope="module", params=PAGES)
def page_file(request, tmp_path_factory):
    """Each page there is, where all that was read is hostile."""
    return request.param, PAGES[request.param](tmp_path_factory.mktemp("hostile"))


def test_nothing_that_was_read_runs_in_a_page(browser, page_file):
    kind, path = page_file
    context = browser.new_context()
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: dialog.dismiss())
    page.goto(path.as_uri())
    if kind != "sweep":  # which has no script
        page.wait_for_selector("html[data-drawn]", state="attached", timeout=100_000)
    for link in page.locator("a[href]").all():
        assert not str(link.get_attribute("href")).strip().lower().startswith("javascript:")
    assert "window.hit=1" in page.inner_text("body"), "what was read is shown as text"
    assert page.evaluate("window.hit") is None
    assert page.locator("iframe, base, object, embed, form, img[src='x'], meta[http-equiv=refresh]").count() == 0
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    context.close()


def test_pages_have_a_policy_that_names_their_scripts(page_file):
    kind, path = page_file
    head = path.read_text(encoding="utf-8").split('http-equiv="Content-Security-Policy" content="')[1]
    policy = head.split('"')[0].replace("&#39;", "'")
    scripts = "'none'" if kind == "sweep" else "'sha256-"
    assert policy.startswith(f"default-src 'none'; script-src {scripts}")
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert policy.endswith("form-action 'none'")
