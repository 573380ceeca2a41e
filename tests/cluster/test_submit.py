"""Runs as jobs of a real Slurm: sent, followed, finished, gone on with past their time limit, on fewer nodes, ended."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import RUN, differ, endings, paceline_says, step, submitted, undisturbed, until_ended, weights
from slurm_lab import until

from paceline.record.events import read_events
from paceline.record.run_dir import RunDir


def test_a_job_on_two_nodes_is_sent_followed_and_gives_the_answer_of_one_rank(lab, run_file):
    job = submitted(str(run_file(steps=40, step_s=0.02)), "--nodes", "2")
    assert "the run is finished" in paceline_says("logs", "runs/line", "-f")
    (row,) = json.loads(paceline_says("jobs", "--json"))
    assert (row["job"], row["state"], row["step"], row["steps"]) == (job, "finished", 40, 40)
    assert "finished" in paceline_says("watch", job, "--once")
    starts = list(read_events(RunDir(RUN).events_file(0), "start"))
    assert [(start["job"], start["ranks"], start["host"]) for start in starts] == [(job, 2, "n1")]
    alone = undisturbed(run_file(steps=40), 1)
    assert differ(weights(), alone) < 1e-5
    script = RUN / "job.sbatch"
    for name in ("events", "checkpoints"):  # the script alone does the same
        shutil.rmtree(RUN / name)
        (RUN / name).mkdir()
    (RUN / "summary.json").unlink()
    again = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=True)
    assert until_ended(lab, again.stdout.strip()) == "COMPLETED"
    assert differ(weights(), alone) < 1e-5


def test_a_run_of_five_time_limits_goes_on_by_itself(lab, run_file):
    Path("short.yaml").write_text("warn_s: 70\nattempts: 1000\n")
    file = run_file(steps=120, step_s=2.0)
    job = submitted(str(file), "--nodes", "2", "--time", "2m", "--site", "short.yaml", "--anyway")
    assert until_ended(lab, job, 1800) == "COMPLETED"
    assert endings()[-1] == "done"
    assert set(endings()[:-1]) == {"again"}
    assert len(endings()) >= 5
    steps = [event["step"] for event in read_events(RunDir(RUN).events_file(0), "step")]
    assert steps == list(range(1, 121))  # each once: nothing is done twice where Slurm warns in time
    assert differ(weights(), undisturbed(run_file(steps=120), 2)) == 0


def test_a_run_that_makes_no_progress_is_left_alone_and_says_why(lab, run_file):
    file = run_file(steps=40, step_s=0.02)
    job = submitted(str(file), "data.fail_at=1", "--nodes", "2")
    assert until_ended(lab, job) == "FAILED"
    assert endings() == ["again", "again", "enough"]
    (row,) = json.loads(paceline_says("jobs", "--json"))
    assert row["state"] == "gave up"
    assert "3 attempts in a row came no further than step 0" in row["why"]
    assert "as the test wants" in row["why"]


def test_a_cancelled_run_saves_stays_away_and_goes_on_when_it_is_sent_again(lab, run_file):
    file = run_file(steps=80, step_s=0.1)
    job = submitted(str(file), "--nodes", "2")
    until("steps are made", lambda: step() > 15)
    assert f"cancelled job {job}" in paceline_says("cancel", "runs/line")
    assert until_ended(lab, job) == "CANCELLED"
    until("the ranks are gone", lambda: not lab.ask("squeue", "-h").strip())
    before = step()
    assert before < 80
    assert "has no job that waits or runs" in paceline_says("cancel", "runs/line", code=2)
    assert until_ended(lab, submitted("runs/line", "--nodes", "2")) == "COMPLETED"
    assert differ(weights(), undisturbed(run_file(steps=80), 2)) == 0


def test_a_run_goes_on_with_fewer_nodes_where_the_site_allows_it(lab, run_file):
    Path("few.yaml").write_text("fewer_nodes: true\n")
    job = submitted(str(run_file(steps=120, step_s=0.1)), "--nodes", "2", "--site", "few.yaml")
    until("steps are made", lambda: step() > 15)
    lab.crash("n2")
    try:
        assert until_ended(lab, job, 240) == "COMPLETED"
    finally:
        lab.start_node("n2")
    starts = list(read_events(RunDir(RUN).events_file(0), "start"))
    assert [start["ranks"] for start in starts] == [2, 1]
    assert differ(weights(), undisturbed(run_file(steps=120), 1)) < 1e-5


def test_a_sweep_of_measure_runs_as_an_array(lab, run_file):
    words = ("--measure", "--ranks", "2", "--time", "10m")
    said = paceline_says("submit", str(run_file(step_s=0.0)), *words)
    job = re.search(r"^job (\d+)", said)[1]
    until("the array has ended", lambda: not lab.ask("squeue", "-h", "-j", job).strip(), 400)
    measured = json.loads(Path("runs/line-measure/ranks-2/measure.json").read_text())
    assert [row["ranks"] for row in measured["rows"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--partition", "gpus"], "there is no such partition; there are debug, short, high"),
        (["--nodes", "1", "--gpus-per-node", "3"], "a node of partition debug has 2"),
        (["--partition", "short", "--time", "2h"], "a job may take 30 min 00 s here"),
        (["--time", "1m"], "would end before its first checkpoint"),
        (["--nodes", "5"], "--nodes 5: there are 2 for a job here"),
        (["--account", "nobody\nid"], "control characters"),
    ],
)
def test_a_request_that_cannot_work_is_refused_in_one_line(lab, run_file, words, why):
    said = paceline_says("submit", str(run_file()), *words, code=2)
    assert why in said
    assert not Path("runs/line").exists()
