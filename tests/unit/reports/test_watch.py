"""The live view: follows a run as it is written, through a kill and a resume, to its end."""

import json
import time
import urllib.error
import urllib.request

import pytest

from paceline.reports.watch import (
    LiveView,
    build_ranks_table,
    draw_sparkline,
    render_view,
    render_watch_page,
    start_server,
)
from paceline.runlog.run_dir import RunDir
from report_runs import make_run, spec_of
from results import expect_error, render_text


def text_of(view):
    view.look()
    return render_text(render_view(view))


@pytest.fixture
def lines(tmp_path):
    """The events of a finished run on two ranks, to be written again bit by bit."""
    path = make_run(tmp_path / "whole", ranks=2, steps=40)
    return (path / "events" / "rank0.jsonl").read_text().splitlines()


@pytest.fixture
def view(tmp_path):
    run = RunDir.claim(tmp_path / "runs", "live", spec_of("live", 2))
    return LiveView(run, run.spec())


def add(view, rank, added, end="\n"):
    with open(view.run.events_file(rank), "a") as file:
        file.write("\n".join(added) + end)


def test_it_follows_a_run_to_its_end(view, lines):
    assert "starting" in text_of(view)
    for rank in (0, 1):
        add(view, rank, lines[:11])
    assert view.look()
    assert not view.look()
    shown = text_of(view)
    assert "step 10 of 200" in shown
    assert [row[:2] for row in build_ranks_table(view).rows] == [("0", "10"), ("1", "10")]
    assert "samples/s" in shown
    add(view, 0, [lines[11], lines[12][:30]], end="")
    assert "step 11" in text_of(view)
    add(view, 0, [lines[12][30:], *lines[13:]])
    shown = text_of(view)
    assert "step 40" in shown
    assert "finished" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_it_shows_what_each_rank_uses_and_what_was_noticed(view, lines):
    device = {"device_share": 0.87, "device_bytes": 93e9, "device_watts": 512.4}
    process = {"cores": 1.02, "resident_bytes": 4.5e8, "network_bytes_s": 1.2e8}
    notice = {"kind": "notice", "t": 1.0, "step": 9, "text": "the loss jumps to 9 at step 9"}
    for rank, used in enumerate((device | process, process)):
        add(view, rank, [*lines[:11], json.dumps({"kind": "usage", "t": 1.0, "step": 10, **used}), json.dumps(notice)])
    assert "noticed      the loss jumps to 9 at step 9" in text_of(view)
    own = ("1", "450 MB", "120 MB/s")
    used = [row[4:] for row in build_ranks_table(view).rows]
    assert used == [("87 %", "93 GB", "512 W", *own), ("–", "–", "–", *own)]


def test_a_page_has_the_curves_the_ranks_and_the_last_events_and_reloads_until_the_end(view, lines):
    evaluate = {"kind": "evaluate", "t": 2.0, "step": 10, "loss": 0.5, "accuracy": 0.75, "n": 64}
    usage = [json.dumps({"kind": "usage", "t": 1.0, "step": step, "cores": 1.0}) for step in (5, 10)]
    for rank in (0, 1):
        add(view, rank, [*lines[:11], *usage, json.dumps(evaluate)])
    view.look()
    page = render_watch_page(view)
    assert 'http-equiv="refresh"' in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["loss"]["lines"][0]["points"][-1][0] == 10
    assert len(data["use"]["lines"]) == 2
    assert data["rate"]["lines"][0]["points"][0][1] == pytest.approx(64 / json.loads(lines[1])["step_s"], rel=1e-3)
    assert "accuracy 0.75" in page
    assert all(f">{row[1]}</td>" in page for row in build_ranks_table(view).rows)
    add(view, 0, lines[11:])
    view.look()
    assert 'http-equiv="refresh"' not in render_watch_page(view)


def test_a_finished_run_is_shown_once_as_text_and_as_a_page(tmp_path, ask):
    path = make_run(tmp_path, "made")
    for words in (["--once"], []):
        assert "finished" in ask("watch", path, *words).out
    assert ask("watch", path, "--page", tmp_path / "live.html").code == 0
    assert "finished" in (tmp_path / "live.html").read_text()
    for words in ([path, "--page", tmp_path / "no" / "live.html"], [tmp_path / "gone"]):
        assert ask("watch", *words).code == 2


def test_the_page_is_served_on_the_loopback_to_who_asks_for_localhost_alone():
    port = start_server(0, lambda: "the page")
    with urllib.request.urlopen(f"http://localhost:{port}/", timeout=20) as response:
        assert response.read() == b"the page"
    for request in (
        f"http://localhost:{port}/spec.yaml",
        urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": "evil.example:80"}),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=20)
        assert refused.value.code == 404
    with expect_error("unavailable", "--serve"):
        start_server(port, lambda: "")


def test_it_survives_a_kill_and_a_resume(view, lines):
    add(view, 0, [*lines[:21], '{"kind":"step","ste'])
    assert "no news for" in text_of(view)
    add(view, 0, [lines[0], json.dumps({"kind": "resume", "t": time.time(), "step": 12}), *lines[13:16]])
    assert "step 15" in text_of(view)
    assert [s["step"] for s in view.ranks[0].steps] == list(range(1, 16))


def test_a_line_of_bars():
    assert draw_sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert len(draw_sparkline([float(n) for n in range(1000)], 60)) <= 60
    assert draw_sparkline([None], 10) == ""
