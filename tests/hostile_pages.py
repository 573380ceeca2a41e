"""Pages of every kind where all that was read is hostile: it would run, ask the network, or not be seen as it is."""

from dataclasses import replace
from pathlib import Path

import yaml

import paceline
from paceline.planner.page.page import render_plan_page as plan_page
from paceline.planner.plan import plan
from paceline.reports.report import report
from paceline.reports.sweep_page import write_sweep_page
from paceline.runlog.events import EventWriter
from paceline.runlog.run_dir import RunDir
from paceline.trials.sweep import Sweep, TrialRow
from paceline.workloads.topics.result.explorer import write_explorer
from report_runs import make_run
from topics_fits import small_fit

UNSEEN = "\u202e\u2067\u200b\u200f\u061c\x9b\x1b[2J\ufeff\u00ad\u2028\u3164\ufe0f\U000e0041"
"""Turns around, steers, or is not there to the eye."""
EVIL = [
    text + UNSEEN
    for text in (
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
    )
]
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def hostile_report(folder):
    run = make_run(folder / EVIL[3].replace("/", ""), "made", 2, steps=8)
    text = RunDir(run).spec_file.read_text()
    quoted = yaml.safe_dump("".join(EVIL), default_style='"', width=1 << 20)
    RunDir(run).spec_file.write_text(text.replace("workload: classifier", f"workload: {quoted}"))
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

    def ask(spec, devices=(), cluster=None):
        found = plan(spec, "2x4xA10", devices, 3.29)
        device = replace(found.target.whole.device, name=text, source=text, date=text)
        site = replace(found.target, name=text, note=text, whole=replace(found.target.whole, device=device))
        return replace(found, target=site, cost_model=replace(found.cost_model, name=text, assumptions=tuple(EVIL)))

    fixed = ["parallel.strategy=ddp", "parallel.activation_checkpointing=none"]
    found = ask(paceline.load(RECIPES / "lm_gpt2.yaml", fixed), (1, 2))
    file = folder / "plan.html"
    file.write_text(plan_page([found], ask, ["paceline", "plan", *EVIL]), encoding="utf-8")
    return file


def hostile_sweep(folder):
    folder = folder / EVIL[0].replace("/", "")
    folder.mkdir()
    values = [{"model.width": 1.0 * number, "model.name": text} for number, text in enumerate(EVIL, 1)]
    done = [TrialRow(number, one, "finished", 0.5, metrics={EVIL[0]: 1.0}) for number, one in enumerate(values, 1)]
    failed = TrialRow(99, values[0], "failed", why="".join(EVIL))
    write_sweep_page(
        Sweep(folder, f"-{EVIL[-1]}", (EVIL[0], *values[0], *EVIL[1:3]), (*map(_every, done), _every(failed)))
    )
    return folder / "sweep.html"


def _every(row):
    return replace(row, values={**dict.fromkeys(EVIL[:3], "".join(EVIL)), **row.values})


PAGES = {"report": hostile_report, "topics": hostile_topics, "plan": hostile_plan, "sweep": hostile_sweep}
