"""What a report says: the right numbers from the right lines, and one clear sentence for each thing that is wrong."""

import json
import re
import shutil

import pytest

from paceline.reports.charts import build_charts
from paceline.reports.comparisons import find_cheapest
from paceline.reports.contents import gather_contents
from paceline.reports.page import escape_tex, render_page
from paceline.reports.report import _build_experts, build_tables, report
from paceline.reports.run_view import Warmup, parse_warmup, read_run_view, thin_points
from paceline.reports.series import TimedSetup, read_times_file
from paceline.runlog.events import EventWriter, read_steps
from report_runs import change_events, make_measurement, make_run
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
    same = made.contents.same
    assert (same.runs, same.differing) == (3, ())
    assert 1e-9 < same.largest < 1e-7 < same.tolerance


def test_the_verdict_comes_first_and_the_page_needs_no_network(made):
    page, text, article = ((made.folder / f"report.{kind}").read_text() for kind in ("html", "md", "tex"))
    assert made.contents.verdict[0].startswith("Take 4 ranks: 2.7")
    assert page.index('id="verdict"') < page.index("How it scales") < page.index("The same training")
    assert text.index("Take 4 ranks") < text.index("## How it scales") < text.index("| 2 ranks | ")
    assert all("no room for 8 stages" in shown for shown in (page, text))
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))
    assert all(part in article for part in (r"\toprule", r"\frac{2(n-1)}{n}", r"\includegraphics"))
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "<script src" not in page
    assert "MIT License" in page  # the chart library's notice travels with it
    assert len(page) < 400_000


def test_every_exhibit_leads_to_its_lines(made, measured):
    for address in re.findall(r'<li><a href="([^"]+)"', made.page.read_text()):
        name, _, line = address.partition("#L")
        assert int(line) <= len((made.folder / name).read_text().splitlines()), address
    lines = (measured / "measure.json").read_text().splitlines()
    place = made.contents.series[0].sources["2 ranks"]
    assert '"label": "2 ranks"' in lines[place.line - 1]


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"train.steps": 30}, "train.steps"),  # another schedule
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
    def losing(name, at):
        path = make_run(tmp_path, name)
        return change_events(path, lambda event: event | ({"loss": None} if event.get("step", 0) >= at else {}))

    same = gather_contents([make_run(tmp_path, "one"), losing("other", 50)]).same
    assert (same.largest, same.run, same.step) == (float("inf"), "other", 50)
    assert gather_contents([losing(name, 1) for name in ("a", "b")]).same.steps == 0


def test_what_was_noticed_while_a_run_went_on_is_on_the_page(tmp_path):
    path = make_run(tmp_path, "noisy")
    with EventWriter(path / "events" / "rank0.jsonl") as events:
        for step in range(5):
            events.write("notice", step=step, text=f"<{step}>")
    contents = gather_contents([path])
    assert contents.notes == [*(f"noisy: <{n}>" for n in range(3)), f"noisy: 2 more are in {contents.runs[0].file}"]
    assert "noisy: &lt;2&gt;" in render_page(contents, [], [])


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
    (series,) = gather_contents(runs).series
    assert [round(row.speedup, 1) for row in series.rows] == [1.0, 1.7, 3.0]
    assert series.kind == "strong"
    single = gather_contents(runs[:1])
    assert not single.series
    assert "loss 0.3" in single.verdict[0]
    assert "samples/s" in single.verdict[-1]
    assert single.command == f"paceline measure {runs[0]}/spec.yaml --ranks 1,2"


def test_a_run_no_better_than_guessing_says_so_first(tmp_path):
    path = make_run(tmp_path, "poor")
    summary = json.loads((path / "summary.json").read_text())
    arrays = {"classes": ["bad", "good"], "support": [60, 40]}
    arrays |= {"precision": [0.6, 0.0], "recall": [1.0, 0.0], "f1": [0.7, 0.0]}
    summary |= {"metrics": {"loss": 0.7, "accuracy": 0.6, "majority": 0.6}, "arrays": arrays, "score": "accuracy"}
    (path / "summary.json").write_text(json.dumps(summary))
    made = report([path], tmp_path / "report")
    assert made.contents.verdict[0].startswith("poor: no better than guessing: accuracy 0.6")
    assert made.contents.command.startswith("paceline sweep ")
    page, parts = made.page.read_text(), ("Result<", "Results of each class", "How it was trained<", "Speed<")
    places = [page.index(f">{part}") for part in parts]
    assert [page.index('id="verdict"'), *places] == sorted([page.index('id="verdict"'), *places])


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
    assert "rank0.jsonl is empty" in (tmp_path / "out" / "report.html").read_text()


COSTS = """setup,devices,minutes,epochs,utilisation,memory,price
1x H100,1,80,200,16 %,1 %,3.29
4x H100,4,20,200,30-40 %,4 %,12.36
8x A100,8,20,200,30-50 %,4 %,10.32
"""


def test_kinds_of_devices_are_compared_by_what_they_cost(tmp_path):
    (tmp_path / "costs.csv").write_text(COSTS)
    found = gather_contents([tmp_path / "costs.csv"])
    costs = [(line.label, line.epoch_s, round(line.usd, 2)) for line in found.costs]
    assert costs == [("1x H100", 24.0, 4.39), ("4x H100", 6.0, 4.12), ("8x A100", 6.0, 3.44)]
    (table,) = build_tables(found)
    assert (table.chosen, table.rows[2][-1], table.rows[1][4]) == (2, "-22 %", "30-40 %")
    assert not found.series
    fast, cheap = TimedSetup(2, 3.6, price=4.0), TimedSetup(1, 7.2, price=1.0)
    assert find_cheapest([fast, cheap]) == cheap
    (tmp_path / "one.csv").write_text("devices,hours\n1,12\n2,6.5\n4,3.5\n8,2\n")
    one = gather_contents([tmp_path / "one.csv"])
    benefit = next(table for table in build_tables(one) if table.name == "benefit")
    returns = [("13", "+8 %", "0.85", "good"), ("14", "+17 %", "0.79", "good"), ("16", "+33 %", "0.64", "diminish")]
    assert [row[2:6] for row in benefit.rows[1:]] == returns
    assert any("at 8 devices" in line for line in one.verdict)


def test_measurements_with_a_price_are_compared_unless_a_row_is_not_possible(tmp_path):
    make_measurement(tmp_path / "a", repeats=1)
    make_measurement(tmp_path / "b", {1: 0.1, 2: 0.001}, repeats=1)
    found = gather_contents([tmp_path / "a", tmp_path / "b"])
    labels = ("1 rank", "2 ranks", "4 ranks")
    assert [line.label for line in found.costs] == [f"docstrings (a), {label}" for label in labels]
    assert [s.name for s in found.series] == ["docstrings (a)", "docstrings (b)"]
    names = ["1 rank (a)", "2 ranks (a)", "4 ranks", "1 rank (b)", "2 ranks (b)"]
    assert [run.name for run in found.runs] == names


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
    speedups = {s.name: {row.label: row.speedup for row in s.rows} for s in found.series}
    assert speedups == {
        "small": {"small-1gpu": 1.0, "small-4gpu": pytest.approx(20 / 44, rel=0.03)},
        "large": {"large-1gpu": 1.0, "large-4gpu": pytest.approx(0.8, rel=0.03)},
    }
    models = next(table for table in build_tables(found) if table.name == "models")
    assert {"speed-up", "efficiency", "R"} <= set(models.head)
    charts = {chart.name: chart for chart in build_charts(found)}
    assert len(charts["scaling"].data["lines"]) == 2
    assert set(charts["breakdown"].data["labels"]) == {"small-1gpu", "small-4gpu", "large-1gpu", "large-4gpu"}


def test_a_pattern_and_a_warm_up_leave_runs_and_steps_out(experiments):
    found = gather_contents([experiments], only="small-*")
    assert {run.name for run in found.runs} == {"small-1gpu", "small-4gpu"}
    with expect_error("not-found", "--only"):
        gather_contents([experiments], only="tiny*")
    folder = [experiments / "small-1gpu"]
    whole, late = (gather_contents(folder, warmup=parse_warmup(text)) for text in ("", "16 steps"))
    assert late.runs[0].times.steps < whole.runs[0].times.steps
    assert parse_warmup("1") == Warmup(1, "epochs")
    with expect_error("invalid-value", "--warmup"):
        parse_warmup("a while")


def test_each_mistake_is_one_line(tmp_path, ask, measured):
    def reject(*words, out="out"):
        answer = ask("report", *words, "--out", tmp_path / out)
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
        return answer.err

    run = make_run(tmp_path, "good")
    assert "neither a run folder nor a table" in reject(run / "summary.json")
    assert "cannot be written" in reject(run, out="/proc/report")
    shutil.copytree(measured, bad := tmp_path / "bad")
    values = json.loads((measured / "measure.json").read_text())
    unfinished = {name: value for name, value in values.items() if name != "rows"}
    for content, wrong in (
        ("{", "is damaged"),
        (json.dumps({**values, "rows": values["rows"][1:], "plan": []}), "one rank"),
        (json.dumps(unfinished), "is not finished"),
    ):
        (bad / "measure.json").write_text(content)
        assert wrong in reject(bad)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "invalid-data"),
        ("devices,seconds\n1,x\n", "invalid-data"),
        ("devices,seconds\n2,3\n", "missing-value"),
        ("devices,seconds\n1,0\n", "invalid-data"),
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
    rows = "1;19.53;small\n4;42.34;small\n1;99.94;large\n4;124.95;large\n"
    file.write_text(f"# as measured in spring\nGPUs;Time;model\n{rows}")
    small, large = gather_contents([file], price=2.0).series
    assert small.rows[1].speedup == pytest.approx(0.461, abs=1e-3)
    assert large.rows[1].speedup == pytest.approx(0.8, abs=1e-3)
    assert small.sources["4 devices"].line == 4
    assert small.recommended.label == "1 device"


def test_tex_is_harmless():
    assert escape_tex("50 % of a_b & {c} \\d") == r"50 \% of a\_\allowbreak{}b \& \{c\} \textbackslash{}d"
    assert "?" in escape_tex("日本")


def test_the_load_of_experts_is_a_multiple_of_an_equal_share():
    (row,) = _build_experts([[0.5, 0.25, 0.25]]).rows
    assert [float(cell) for cell in row] == [0, 3, 1.5, 0.75]
