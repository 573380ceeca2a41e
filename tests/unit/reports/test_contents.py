"""What a report says: the right numbers from the right lines, and one clear sentence for each thing that is wrong."""

import json
import re
import shutil
import time

import pytest

from paceline.errors import UserError
from paceline.reports.charts import build_charts
from paceline.reports.comparisons import CostLine, find_cheapest
from paceline.reports.contents import gather_contents
from paceline.reports.page import escape_tex, render_markdown, render_page
from paceline.reports.report import _build_experts, build_tables, report
from paceline.reports.run_view import Warmup, parse_warmup, read_run_view, thin_points
from paceline.reports.series import read_times_file
from paceline.runlog.events import read_steps
from report_runs import make_links, make_measurement, make_run
from results import expect_error


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return make_measurement(tmp_path_factory.mktemp("runs") / "docstrings-measure")


@pytest.fixture(scope="module")
def made(measured, tmp_path_factory):
    return report([measured], tmp_path_factory.mktemp("report"))


def test_everything_is_written(made):
    names = {path.relative_to(made.folder).as_posix() for path in made.folder.rglob("*") if path.is_file()}
    assert {"report.html", "report.md", "report.tex"} <= names
    for figure in ("scaling", "breakdown", "loss", "difference", "memory"):
        assert {f"figures/{figure}.{kind}" for kind in ("png", "pdf", "svg")} <= names
    assert made.page.stat().st_size < 400_000


def test_the_verdict_comes_first(made):
    page, text = made.page.read_text(), (made.folder / "report.md").read_text()
    assert made.contents.verdict[0].startswith("Take 4 ranks: 2.7")
    assert page.index('id="verdict"') < page.index("How it scales") < page.index("The same training")
    assert text.index("Take 4 ranks") < text.index("## How it scales")
    assert "no room for 8 stages" in page
    assert "no room for 8 stages" in text


def test_the_page_needs_no_network(made):
    page = made.page.read_text()
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "<script src" not in page
    assert "MIT License" in page  # the chart library's notice travels with it


def test_every_exhibit_leads_to_its_lines(made, measured):
    page = made.page.read_text()
    for address in re.findall(r'<li><a href="([^"]+)"', page):
        name, _, line = address.partition("#L")
        file = (made.folder / name).resolve()
        assert file.is_file(), address
        assert int(line) <= len(file.read_text().splitlines())
    lines = (measured / "measure.json").read_text().splitlines()
    place = made.contents.series[0].sources["2 ranks"]
    assert '"label": "2 ranks"' in lines[place.line - 1]


def test_the_same_training_is_said_with_a_number(made):
    same = made.contents.same
    assert (same.runs, same.differing) == (3, ())
    assert 1e-9 < same.largest < 1e-7 < same.tolerance


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"train.steps": 30}, "train.steps"),  # another schedule
        ({"train.clip": 0.5}, "train.clip"),
        ({"train.ema": 0.9}, "train.ema"),
        ({"model.width": 32}, "model.width"),
        ({"parallel.reduce": "bf16", "parallel.ranks": 2}, "parallel.reduce"),
        ({"train.keep": 7, "train.log_every": 1, "parallel.ranks": 2, "data.cache": "/elsewhere"}, ""),
    ],
)
def test_losses_are_compared_only_where_the_specs_ask_for_the_same(changed, differs, tmp_path):
    other = make_run(tmp_path, "other", changed.pop("parallel.ranks", 1), **changed)
    contents = gather_contents([make_run(tmp_path, "one"), other])
    assert contents.same.differing == ((differs,) if differs else ())


def test_the_length_of_a_run_does_not_matter_where_its_rate_is_constant(tmp_path):
    constant = {"train.schedule": "constant", "train.warmup": 0.0}
    runs = [make_run(tmp_path, f"for{n}", steps=n, **constant, **{"train.steps": n}) for n in (30, 40)]
    same = gather_contents(runs).same
    assert (same.differing, same.largest, same.steps) == ((), 0.0, 30)


def test_losses_that_cannot_be_held_against_each_other_are_not_called_equal(tmp_path):
    def losing(path, at):
        file = path / "events" / "rank0.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {"loss": None} if line.get("step", 0) >= at else {}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    one, other = make_run(tmp_path, "one"), losing(make_run(tmp_path, "other"), 50)
    same = gather_contents([one, other]).same
    assert (same.largest, same.run, same.step) == (float("inf"), "other", 50)
    neither = [losing(make_run(tmp_path, name), 1) for name in ("a", "b")]
    assert gather_contents(neither).same.steps == 0


def test_speeds_of_different_work_are_not_compared(tmp_path):
    runs = [make_run(tmp_path, "wide", 1), make_run(tmp_path, "narrow", 2, step_s=0.01, **{"model.width": 32})]
    contents = gather_contents(runs)
    assert not contents.series
    assert contents.same.differing == ("model.width",)


def test_a_point_above_the_ideal_line_is_on_the_chart(tmp_path):
    (tmp_path / "times.csv").write_text("devices,seconds\n1,10\n2,1.5\n")
    contents = gather_contents([tmp_path / "times.csv"])
    scaling = next(chart for chart in build_charts(contents, tmp_path) if chart.name == "scaling")
    assert scaling.data["top"] > 6.67
    assert not any("would reach" in line for line in contents.verdict)


def test_what_was_noticed_while_a_run_went_on_is_on_the_page(tmp_path):
    path = make_run(tmp_path, "noisy")
    with open(path / "events" / "rank0.jsonl", "a") as file:
        for step in range(5):
            text = f"the loss jumps to <9> at step {step}"
            file.write(json.dumps({"kind": "notice", "t": 1.0, "step": step, "text": text}) + "\n")
    contents = gather_contents([path])
    assert contents.notes[:3] == [f"noisy: the loss jumps to <9> at step {step}" for step in range(3)]
    assert contents.notes[3] == f"noisy: 2 more are in {path / 'events' / 'rank0.jsonl'}"
    shown = (report([path], tmp_path / "report").page).read_text()
    assert "noisy: the loss jumps to &lt;9&gt; at step 2" in shown


@pytest.mark.parametrize(("steps", "over"), [(60, "mean of the last 10 steps"), (1, "at the last step")])
def test_the_training_loss_says_over_which_steps_it_is(tmp_path, steps, over):
    page = report([make_run(tmp_path, steps=steps)], tmp_path / "report").page
    assert over in page.read_text()


def test_markdown_and_latex_have_the_tables(made):
    text, article = ((made.folder / f"report.{kind}").read_text() for kind in ("md", "tex"))
    assert "| 2 ranks | " in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert r"\toprule" in article
    assert r"\frac{2(n-1)}{n}" in article
    assert r"\includegraphics" in article


def test_devices_are_shown_where_they_are_known(measured, made, tmp_path):
    shutil.copytree(measured, folder := tmp_path / "measured")
    values = json.loads((folder / "measure.json").read_text())
    used = {"device_share": 0.93, "device_bytes": 4.2e9}
    values["rows"][0] |= {"device": "NVIDIA H200", "mfu": 0.4567, "usage": used}
    (folder / "measure.json").write_text(json.dumps(values, indent=2))
    contents = gather_contents([folder])
    shown, cells = build_charts(contents, tmp_path), build_tables(contents)
    for text in (render_page(contents, shown, cells), render_markdown(contents, shown, cells)):
        assert all(word in text for word in ("NVIDIA H200", "MFU", "45.7 %", "93 %", "4.2 GB"))
    assert "MFU" not in made.page.read_text()


def test_points_know_their_lines(tmp_path):
    path = make_run(tmp_path, steps=30)
    file = path / "events" / "rank0.jsonl"
    lines = file.read_text().splitlines()
    resumed = [*lines[:21], '{"kind":"step","st', '{"kind":"resume","t":1,"step":10}', *lines[11:]]
    file.write_text("\n".join(resumed) + "\n")
    run = read_run_view(path)
    assert [p.step for p in run.points] == [event["step"] for event in read_steps(file)] == list(range(1, 31))
    for point in run.points:
        event = json.loads(resumed[point.line - 1])
        assert (event["step"], event["loss"]) == (point.step, point.loss)
    assert run.torn == 1


def test_thinning_keeps_every_spike(tmp_path):
    run = read_run_view(make_run(tmp_path, steps=900))
    kept = thin_points(run.points, 100)
    assert len(kept) <= 110
    assert {min(run.points, key=lambda p: p.loss), max(run.points, key=lambda p: p.loss)} <= set(kept)
    assert (kept[0], kept[-1]) == (run.points[0], run.points[-1])


def test_plain_runs_become_rows(tmp_path):
    runs = [make_run(tmp_path, f"on{n}", n, step_s=0.1 / n**0.8) for n in (1, 2, 4)]
    found = gather_contents(runs)
    (series,) = found.series
    assert [round(row.speedup, 1) for row in series.rows] == [1.0, 1.7, 3.0]
    assert series.kind == "strong"
    single = gather_contents(runs[:1])
    assert not single.series
    assert single.verdict[0] == "on1: loss 0.3 (lower is better)."
    assert "samples/s" in single.verdict[-1]
    assert single.command == f"paceline measure {runs[0]}/spec.yaml --ranks 1,2"


def test_a_run_no_better_than_guessing_says_so_first(tmp_path):
    path = make_run(tmp_path, "poor")
    summary = json.loads((path / "summary.json").read_text())
    arrays = {
        "classes": ["bad", "good"],
        "support": [60, 40],
        "precision": [0.6, 0.0],
        "recall": [1.0, 0.0],
        "f1": [0.7, 0.0],
    }
    summary |= {"metrics": {"loss": 0.7, "accuracy": 0.6, "majority": 0.6}, "arrays": arrays, "score": "accuracy"}
    (path / "summary.json").write_text(json.dumps(summary))
    made = report([path], tmp_path / "report")
    assert made.contents.verdict[0].startswith("poor: no better than guessing: accuracy 0.6")
    assert made.contents.command.startswith("paceline sweep ")
    page = made.page.read_text()
    places = [
        page.index(text)
        for text in ('id="verdict"', ">Result<", "Results of each class", ">How it was trained<", ">Speed<")
    ]
    assert places == sorted(places)


def test_damaged_runs_are_named_and_the_rest_is_shown(tmp_path, ask):
    good, torn, empty, half = (make_run(tmp_path, name) for name in ("good", "torn", "empty", "half"))
    events = torn / "events" / "rank0.jsonl"
    events.write_text(events.read_text()[:-200])
    (empty / "events" / "rank0.jsonl").write_text("")
    (half / "summary.json").unlink()
    answer = ask("report", good, torn, empty, half, "--out", tmp_path / "out")
    assert answer.code == 0
    for text in ("torn/events/rank0.jsonl: 1 line could not be read", "rank0.jsonl is empty", "half is not finished"):
        assert text in answer.err
    assert "good" not in answer.err
    page = (tmp_path / "out" / "report.html").read_text()
    assert "rank0.jsonl is empty" in page


def test_links_are_shown_alone_and_beside_a_measurement(tmp_path, measured):
    alone = report([make_links(tmp_path / "net")], tmp_path / "alone")
    assert alone.figures == ("links",)
    assert alone.contents.title == "net"
    assert alone.contents.verdict[0].startswith("A link of net carries 1 Gbit/s")
    text = (alone.folder / "report.md").read_text()
    assert text.count("| 1 Gbit/s |") == 6
    assert "| all-reduce, 2 ranks, b and c | 1 ms | 9 ms | 33 ms | 1 Gbit/s |" in text
    line = alone.contents.links[0].sources[4].line
    assert '"collective": "all_reduce"' in (tmp_path / "net" / "links.json").read_text().splitlines()[line - 1]
    points = build_charts(alone.contents, tmp_path)[0].data["lines"][0]["points"]
    assert points[-1] == [4_000_000, pytest.approx(8 * 4 / 3 * 4e6 / (1e-3 + 8 * 4 / 3 * 4e6 / 1e9) / 1e9, rel=1e-4)]

    both = tmp_path / "both"
    shutil.copytree(measured, make_links(both), dirs_exist_ok=True)
    found = gather_contents([both])
    assert len(found.links) == len(found.series) == 1
    assert found.verdict[0].startswith("Take 4 ranks")
    assert {"scaling", "links"} <= {chart.name for chart in build_charts(found, tmp_path)}


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 1}', '{"format": 2, "links": []}', '{"format": 1, "links": []}',
     '{"format": 1, "links": [3]}',
     '{"format": 1, "links": [{"collective": "gossip", "between": "all ranks", "ranks": 2, "sizes_bytes": [1], '
     '"seconds": [1], "latency_s": 1, "bandwidth_bits_s": 1}]}'],
)  # fmt: skip
def test_damaged_links_are_named_and_left_out(tmp_path, ask, text):
    run, net = make_run(tmp_path, "good"), tmp_path / "net"
    net.mkdir()
    (net / "links.json").write_text(text)
    found = gather_contents([run, net])
    assert len(found.runs) == 1
    assert not found.links
    assert len(found.left_out) == 1
    assert "net/links.json" in found.left_out[0]
    assert "links.json" in refused(ask, net, "--out", tmp_path / "out")


COSTS = """setup,devices,minutes,epochs,utilisation,memory,price
1x H100,1,80,200,16 %,1 %,3.29
4x H100,4,20,200,30-40 %,4 %,12.36
8x A100,8,20,200,30-50 %,4 %,10.32
"""


def test_kinds_of_devices_are_compared_by_what_they_cost(tmp_path):
    (tmp_path / "costs.csv").write_text(COSTS)
    found = gather_contents([tmp_path / "costs.csv"])
    assert [(line.label, line.epoch_s, round(line.usd, 2)) for line in found.costs] == [
        ("1x H100", 24.0, 4.39), ("4x H100", 6.0, 4.12), ("8x A100", 6.0, 3.44)
    ]  # fmt: skip
    (table,) = build_tables(found)
    assert (table.chosen, table.rows[2][-1], table.rows[1][4]) == (2, "-22 %", "30-40 %")
    assert not found.series
    (tmp_path / "one.csv").write_text("devices,hours\n1,12\n2,6.5\n4,3.5\n8,2\n")
    one = gather_contents([tmp_path / "one.csv"])
    benefit = next(table for table in build_tables(one) if table.name == "benefit")
    assert [row[2:6] for row in benefit.rows[1:]] == [
        ("13", "+8 %", "0.85", "good"), ("14", "+17 %", "0.79", "good"), ("16", "+33 %", "0.64", "diminish")
    ]  # fmt: skip
    assert any("at 8 devices" in line for line in one.verdict)


def test_measurements_with_a_price_are_compared_unless_a_row_is_not_possible(tmp_path):
    make_measurement(tmp_path / "a", repeats=1)
    make_measurement(tmp_path / "b", {1: 0.1, 2: 0.001}, repeats=1)
    found = gather_contents([tmp_path / "a", tmp_path / "b"])
    assert [line.label for line in found.costs] == [f"docstrings (a), {n} rank{'s' * (n > 1)}" for n in (1, 2, 4)]
    assert [s.name for s in found.series] == ["docstrings (a)", "docstrings (b)"]
    assert [run.name for run in found.runs] == [
        "1 rank (a)", "2 ranks (a)", "4 ranks", "1 rank (b)", "2 ranks (b)"
    ]  # fmt: skip
    assert find_cheapest([CostLine("fast", 2, 0.001, 4.0), CostLine("cheap", 1, 0.002, 1.0)]).label == "cheap"


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    """Two models on one and four ranks, as plain runs; both models are slower on four."""
    folder = tmp_path_factory.mktemp("experiments")
    for model, layers, alone, four in (("small", 1, 0.02, 0.044), ("large", 4, 0.1, 0.125)):
        for ranks, step_s in ((1, alone), (4, four)):
            comm = 0.0 if ranks == 1 else 0.6
            make_run(folder, f"{model}-{ranks}gpu", ranks, 24, step_s, comm, **{"model.layers": layers})
    return folder


def test_runs_of_a_folder_are_grouped_by_equal_work(experiments):
    found = gather_contents([experiments])
    assert {tuple(row.label for row in s.rows) for s in found.series} == {
        ("small-1gpu", "small-4gpu"), ("large-1gpu", "large-4gpu")
    }  # fmt: skip
    speedups = {s.rows[1].label: s.rows[1].speedup for s in found.series}
    assert speedups == {"small-4gpu": pytest.approx(20 / 44, rel=0.03), "large-4gpu": pytest.approx(0.8, rel=0.03)}
    models = next(table for table in build_tables(found) if table.name == "models")
    assert {"speed-up", "efficiency", "R"} <= set(models.head)
    charts = {chart.name: chart for chart in build_charts(found, experiments)}
    assert len(charts["scaling"].data["lines"]) == 2
    assert set(charts["breakdown"].data["labels"]) == {"small-1gpu", "small-4gpu", "large-1gpu", "large-4gpu"}
    assert {s.name for s in found.series} == {"small", "large"}


def test_a_pattern_and_a_warm_up_leave_runs_and_steps_out(experiments):
    found = gather_contents([experiments], only="small-*")
    assert {run.name for run in found.runs} == {"small-1gpu", "small-4gpu"}
    with expect_error("not-found", "--only"):
        gather_contents([experiments], only="tiny*")
    folder = [experiments / "small-1gpu"]
    whole, late = (gather_contents(folder, warmup=parse_warmup(text)) for text in ("", "16 steps"))
    assert late.runs[0].times.steps < whole.runs[0].times.steps
    assert parse_warmup("1") == Warmup(1, "epochs")
    with pytest.raises(UserError, match="number of epochs"):
        parse_warmup("a while")


def refused(ask, *words):
    answer = ask("report", *words)
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    return answer.err


def test_each_mistake_is_one_line(tmp_path, ask, measured):
    run = make_run(tmp_path, "good")
    other = make_run(tmp_path, "lm")
    text = (other / "spec.yaml").read_text()
    lm = re.sub(r"(?s)^model:.*?(?=^train:)", "", text.replace("workload: classifier", "workload: lm"), flags=re.M)
    (other / "spec.yaml").write_text(lm)
    (tmp_path / "folder").mkdir()
    out = ("--out", tmp_path / "out")
    assert "is not a run folder" in refused(ask, tmp_path / "folder", *out)
    assert "does not exist" in refused(ask, tmp_path / "gone", *out)
    assert "neither a run folder nor a table" in refused(ask, run / "summary.json", *out)
    assert "different workloads" in refused(ask, run, other, *out)
    assert "cannot be written" in refused(ask, run, "--out", "/proc/report")
    assert "--price" in refused(ask, run, "--price", "-2", *out)
    bad = tmp_path / "bad"
    shutil.copytree(measured, bad)
    (bad / "measure.json").write_text((measured / "measure.json").read_text()[:3000])
    assert "is damaged" in refused(ask, bad, *out)
    values = json.loads((measured / "measure.json").read_text())
    (bad / "measure.json").write_text(json.dumps({**values, "rows": values["rows"][1:], "plan": []}))
    assert "one rank" in refused(ask, bad, *out)
    del values["rows"]
    (bad / "measure.json").write_text(json.dumps(values))
    assert "is not finished" in refused(ask, bad, *out)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid-data"),
        ("devices,seconds\n", "invalid-data"),
        ("a,b\n1,2\n", "invalid-data"),
        ("devices,seconds\n1,x\n", "invalid-data"),
        ("devices,seconds\n2,3\n", "missing-value"),
        ("devices,seconds\n1,0\n", "invalid-data"),
        ("1\n", "invalid-data"),
        ("devices,seconds\n1,19\n1" + "0" * 400 + ",3\n", "invalid-data"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, text, code):
    file = tmp_path / "times.csv"
    file.write_text(text)
    with expect_error(code):
        read_times_file(file)


def test_a_table_of_times(tmp_path):
    file = tmp_path / "old.csv"
    file.write_text(
        "# as measured in spring\nGPUs;Time;model\n1;19.53;small\n4;42.34;small\n1;99.94;large\n4;124.95;large\n"
    )
    small, large = gather_contents([file]).series
    assert small.rows[1].speedup == pytest.approx(0.461, abs=1e-3)
    assert large.rows[1].speedup == pytest.approx(0.8, abs=1e-3)
    assert small.sources["4 devices"].line == 4
    assert small.recommended.label == "1 device"
    report([file], tmp_path / "out", price=2.0)


def test_tex_is_harmless():
    assert escape_tex("50 % of a_b & {c} \\d") == r"50 \% of a\_\allowbreak{}b \& \{c\} \textbackslash{}d"
    assert "?" in escape_tex("日本")


@pytest.fixture(scope="module")
def twenty_long(tmp_path_factory):
    """A report of 20 runs, and the seconds of the processor that it took."""
    folder = tmp_path_factory.mktemp("twenty")
    runs = [make_run(folder, "r0", steps=10_000)]
    for n in range(1, 20):
        runs.append(folder / f"r{n}")
        shutil.copytree(runs[0], runs[-1])
    began = time.process_time()
    return report(runs, folder / "out"), time.process_time() - began


def test_twenty_long_runs_make_a_small_page(twenty_long):
    found, cpu_s = twenty_long
    assert found.page.stat().st_size < 5_000_000
    assert len(found.contents.runs) == 20
    assert cpu_s < 30, "about 5 s on an idle core"


@pytest.mark.timing
def test_twenty_long_runs_are_quick(twenty_long):
    assert twenty_long[1] < 10


def test_the_load_of_experts_is_a_multiple_of_an_equal_share():
    (row,) = _build_experts([[0.5, 0.25, 0.25]]).rows
    assert [float(cell) for cell in row] == [0, 3, 1.5, 0.75]
