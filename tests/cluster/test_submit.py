"""Runs as jobs of a real Slurm: sent, followed, finished, gone on with past their time limit, on fewer nodes, ended."""

import getpass
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import yaml
from runs import RUN, differ, ended, endings, paceline_says, step, submitted, undisturbed, until_ended, weights
from slurm_lab import until

from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir


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
    """Slurm counts in minutes and warns up to half a minute early: a job has 20 to 50 s here, its start included."""
    Path("short.yaml").write_text("warn_s: 70\nattempts: 1000\n")
    file = run_file(steps=500, step_s=1.0)
    job = submitted(str(file), "data.until=enough", "--nodes", "2", "--time", "2m", "--site", "short.yaml", "--anyway")
    until("five limits are over", lambda: lab.hurry(job) or len(endings()) >= 5, 1200)
    Path("enough").touch()
    assert until_ended(lab, job) == "COMPLETED"
    *limits, last = endings()
    assert (set(limits), last) == ({"again"}, "done")
    assert {record["why"].partition(";")[0] for record in ended()[:-1]} == {"the time limit is near"}
    steps = [event["step"] for event in read_events(RunDir(RUN).events_file(0), "step")]
    assert steps == list(range(1, 501))  # each once: nothing is done twice where Slurm warns in time
    assert differ(weights(), undisturbed(run_file(steps=500), 2)) == 0


def test_ranks_that_do_not_stop_before_the_limit_go_on_from_their_checkpoint(lab, run_file):
    Path("short.yaml").write_text("warn_s: 10\n")
    words = ("--nodes", "2", "--time", "1m", "--site", "short.yaml", "--anyway")
    job = submitted(str(run_file(steps=30, step_s=0.0)), "data.hold_at=15", "data.until=enough", *words)
    until("the limit is over", lambda: endings(), 180)
    Path("enough").touch()
    assert until_ended(lab, job) == "COMPLETED"
    assert endings() == ["again", "done"]
    assert ended()[0]["why"] == "the time limit came before the ranks had stopped; the next one resumes from step 10"
    assert differ(weights(), undisturbed(run_file(steps=30), 2)) == 0


def test_a_lost_rank_starts_again_in_its_job_and_a_lost_node_requeues_it(lab, run_file):
    file = run_file(steps=2000, step_s=0.1)
    asked = ("parallel.ranks=2..4", "data.until=enough", "--nodes", "2", "--ranks-per-node", "2", "--time", "60m")
    job = submitted(str(file), *asked)
    until("it trains", lambda: step() > 25, 180)
    os.kill(lab.ranks("n2")[0], signal.SIGKILL)
    at_s, events = time.time(), RunDir(RUN).events_file(0)

    def find(kind="start"):
        return list(read_events(events, kind))

    until("it starts again", lambda: len(find()) == 2, 180)
    reached = step()
    until("it goes on", lambda: step() > reached + 15, 180)
    again_s = next(event["t"] for event in find("step") if event["t"] > find()[1]["t"]) - at_s
    print(f"without work after a lost rank: {again_s:.1f} s")
    lab.crash("n2")
    again = [4, 4, 2]
    until("it goes on with one node", lambda: lab.hurry(job) or [e["ranks"] for e in find()] == again, 300)
    lab.start_node("n2")
    Path("enough").touch()
    assert until_ended(lab, job, 300) == "COMPLETED"
    assert [(start["job"], start["restarts"]) for start in find()] == [(job, 0), (job, 0), (job, 1)]
    assert endings()[0] == "here"
    assert differ(weights(), undisturbed(file, 2)) < 1e-5


def test_a_run_that_makes_no_progress_is_left_alone_and_says_why(lab, run_file):
    file = run_file(steps=40, step_s=0.02)
    job = submitted(str(file), "data.fail_at=1", "--nodes", "2")
    assert until_ended(lab, job) == "FAILED"
    assert endings() == ["again", "again", "enough"]
    (row,) = json.loads(paceline_says("jobs", "--json"))
    assert row["state"] == "gave up"
    assert "3 attempts in a row came no further than step 0" in row["why"]
    assert "as the test wants" in row["why"]


def test_a_node_without_our_package_is_named_in_the_log(lab, run_file):
    bare = Path("bare.sh").resolve()
    bare.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" = n2 ] && exec {sys.executable} -I -S "$@"\nexec {sys.executable} "$@"\n'
    )
    bare.chmod(0o755)
    Path("bare.yaml").write_text(yaml.safe_dump({"python": str(bare)}))
    job = submitted(str(run_file(steps=40)), "--nodes", "2", "--site", "bare.yaml")
    assert until_ended(lab, job) == "FAILED"
    said = paceline_says("logs", job)
    assert "No module named paceline" in said
    assert "srun: error: n2: task 1: Exited with exit code 1" in said
    assert "3 attempts in a row came no further than step 0; what they printed:  paceline logs '" in said


def test_scratch_is_made_on_each_node_or_the_node_is_named_where_it_cannot_be(lab, run_file):
    Path("scratch.yaml").write_text(yaml.safe_dump({"scratch": f"{lab.local}/it's {{user}}/{{job}}"}))
    words = (str(run_file(steps=5, step_s=0.0)), "--nodes", "2", "--site", "scratch.yaml")
    job = submitted(*words)
    assert until_ended(lab, job) == "COMPLETED"
    there = lab.ask("srun", "--nodes=2", "sh", "-c", f'echo "$(hostname)" "{lab.local}"/*/*')
    assert set(there.splitlines()) == {f"{node} {lab.local}/it's {getpass.getuser()}/{job}" for node in lab.nodes}
    lab.ask("srun", "--nodes=1", "--nodelist=n2", "mount", "-o", "remount,ro", str(lab.local))
    try:
        failed = submitted(*words)
        assert until_ended(lab, failed) == "FAILED"
        assert f"/{failed} cannot be written on n2" in paceline_says("logs", failed)
    finally:
        lab.ask("srun", "--nodes=1", "--nodelist=n2", "mount", "-o", "remount,rw", str(lab.local))


def test_a_cancelled_run_saves_stays_away_and_goes_on_when_it_is_sent_again(lab, run_file):
    file = run_file(steps=80, step_s=0.1)
    job = submitted(str(file), "--nodes", "2")
    until("steps are made", lambda: step() > 15)
    paceline_says("cancel", "runs/line", "runs/nothing", code=2)
    assert lab.ask("squeue", "-h", "-t", "RUNNING").strip(), "one of two cannot be cancelled, so none is"
    assert f"cancelled job {job}" in paceline_says("cancel", "runs/line")
    assert until_ended(lab, job) == "CANCELLED"
    until("the ranks are gone", lambda: not lab.ask("squeue", "-h").strip())
    before = step()
    assert before < 80
    assert "has no pending or running job" in paceline_says("cancel", "runs/line", code=2)
    assert until_ended(lab, submitted("runs/line", "--nodes", "2")) == "COMPLETED"
    assert differ(weights(), undisturbed(run_file(steps=80), 2)) == 0


def test_a_run_goes_on_with_fewer_nodes_where_the_site_allows_it(lab, run_file):
    Path("few.yaml").write_text("fewer_nodes: true\n")
    words = ("--nodes", "2", "--ranks-per-node", "2", "--site", "few.yaml")
    job = submitted(str(run_file(steps=120, step_s=0.1)), *words)
    until("steps are made", lambda: step() > 15)
    lab.crash("n2")
    try:
        assert until_ended(lab, job, 240) == "COMPLETED"
    finally:
        lab.start_node("n2")
    starts = list(read_events(RunDir(RUN).events_file(0), "start"))
    assert [start["ranks"] for start in starts] == [4, 2]
    assert differ(weights(), undisturbed(run_file(steps=120), 1)) < 1e-5


def test_gpus_are_asked_for_by_their_kind(lab, run_file):
    job = submitted(str(run_file(steps=5)), "--nodes", "2", "--gpus-per-node", "2", "--time", "10m")
    told = lab.ask("scontrol", "show", "job", job)
    lab.ask("scancel", job)
    assert "gpu:a100:2" in told
    assert "NumTasks=4" in told


def test_a_sweep_of_measure_runs_as_an_array(lab, run_file):
    job = submitted(str(run_file(step_s=0.0)), "--measure", "--ranks", "2", "--time", "10m")
    until("the array has ended", lambda: not lab.ask("squeue", "-h", "-j", job).strip(), 400)
    measured = json.loads(Path("runs/line-measure/ranks-2/measure.json").read_text())
    assert [row["ranks"] for row in measured["rows"]] == [1, 2]


def test_a_sweep_is_taken_apart_by_an_array(lab, run_file):
    Path("trees.yaml").write_text("{name: trees, workload: trees, train: {steps: 3}, data: {rows: 500}}")
    words = ("sweep", "trees.yaml", "model.max_depth=2,3")
    trial = f"{shlex.join([sys.executable, '-m', 'paceline', *words])} --trial $SLURM_ARRAY_TASK_ID"
    lab.ask("sbatch", "--array=1-2", "--wrap", trial)
    until("the array has ended", lambda: not lab.ask("squeue", "-h").strip(), 180)
    told = json.loads(paceline_says(*words, "--show", "--json"))
    assert [row["status"] for row in told["trials"]] == ["finished", "finished"]


def test_a_command_runs_on_every_rank_and_again_while_it_saves(lab, run_file):
    Path("train.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "rank, world, again = (os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR'))\n"
        "restarts = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "Path('out').mkdir(exist_ok=True)\nPath(f'out/{restarts}-{rank}.pt').write_text(f'{world} {again}')\n"
        "sys.exit(int(restarts == '0'))\n"
    )
    words = ("--nodes", "2", "--ranks-per-node", "2", "--time", "5m", "--checkpoints", "out/*.pt")
    job = submitted(*words, "--", "torchrun", "--nproc-per-node", "8", "train.py")
    assert until_ended(lab, job) == "COMPLETED"
    assert {file.name for file in Path("out").iterdir()} == {f"{k}-{rank}.pt" for k in (0, 1) for rank in range(4)}
    assert {file.read_text() for file in Path("out").iterdir()} == {"4 n1"}


def test_the_queue_is_asked_which_request_finishes_first(lab, run_file):
    file = str(run_file(steps=40))

    def ask(verb):
        return json.JSONDecoder().raw_decode(paceline_says(verb, file, "--queue", "--json"))[0]

    assert ask("submit")["failed"] == []
    busy = lab.ask("sbatch", "--parsable", "--nodelist=n2", "--exclusive", "--time=30", "--wrap=sleep 600").strip()
    until("n2 is taken", lambda: busy in lab.ask("squeue", "-h", "-t", "RUNNING", "--format=%i"))
    try:
        found = ask("plan")
        one, two = found["rows"]
        assert (one["nodes"], two["nodes"], found["best"]) == (1, 2, 1)
        waits = datetime.fromisoformat(two["start"]) - datetime.fromisoformat(one["start"])
        assert timedelta(minutes=20) < waits < timedelta(minutes=40)
        assert "--nodes 1" in paceline_says("submit", file, "--queue", "--nodes", "1,2")
        assert not Path("runs").exists()
        assert "--nodes" in paceline_says("submit", file, "--queue", "--nodes", "9", code=2)
    finally:
        lab.ask("scancel", busy)
