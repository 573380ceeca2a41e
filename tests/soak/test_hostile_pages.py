"""Text that would run, in every place that a page shows: a browser executes none of it, and asks no network."""

import json

import pytest

from paceline.record.events import EventWriter
from paceline.record.run_dir import RunDir
from paceline.reporting.report import report
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
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every page there is, of a run and of topics whose words are hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    run = make_run(folder / EVIL[3].replace("/", ""), "made", 2, steps=8)
    text = RunDir(run).spec_file.read_text()
    RunDir(run).spec_file.write_text(text.replace("workload: classifier", f"workload: {json.dumps(''.join(EVIL))}"))
    with EventWriter(run / "events" / "rank0.jsonl") as events:
        for text in EVIL:
            events.write("evaluate", step=8, **{text: 0.5, "metrics": {text: 0.5, "loss": 1.0}})
            events.write("start", host=text, cpu=text, gpus=EVIL, commit=text, device=text, ranks=2)
        events.write("end", status="failed", why="".join(EVIL))
    made = report([run], folder / "report", title="".join(EVIL))
    X, fit = small_fit(documents=len(EVIL) * 4)
    fit.terms[: len(EVIL)] = EVIL
    fit.names[: len(EVIL)] = EVIL
    explorer = write_explorer(fit, folder / "topics.html", X=X, title="".join(EVIL))
    return [made.page, explorer]


def test_nothing_that_was_read_runs_in_a_page(browser, pages):
    for path in pages:
        context = browser.new_context()
        page, asked = context.new_page(), []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.on("dialog", lambda dialog: dialog.dismiss())
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", state="attached", timeout=100_000)
        for link in page.locator("a[href]").all():
            assert not str(link.get_attribute("href")).strip().lower().startswith("javascript:")
        assert page.evaluate("window.hit") is None, path.name
        assert page.locator("iframe, base, object, embed, img[src='x']").count() == 0
        outside = [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]
        assert outside == []
        assert [url for url in asked if url.startswith("file:")] == [path.as_uri()]
        context.close()


def test_pages_have_a_policy_that_names_their_scripts(pages):
    for path in pages:
        head = path.read_text(encoding="utf-8").split('http-equiv="Content-Security-Policy" content="')[1]
        policy = head.split('"')[0].replace("&#39;", "'")
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
