"""What `submit`, `logs` and `cancel` print for other programs, as far as no Slurm is needed for it."""

import json
import subprocess

import pytest

from paceline.runlog.jobs import record_job_event
from paceline.runlog.run_dir import RunDir


@pytest.fixture
def sent(small, tmp_path, monkeypatch):
    """A run that has had two jobs, on a machine without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    run = RunDir.claim(tmp_path / "runs", "small", small)
    for job, text in (("7", "first\n"), ("8", "second \x1b[2J\n")):
        log = run.path / f"slurm-{job}.out"
        log.write_text(text)
        record_job_event(run, "submit", job=job, log=str(log))
    return run


def test_a_dry_run_as_json_has_the_script_and_the_reasons(sent, ask):
    (sent.path.parent / "run.yaml").write_text("name: line\n")
    told = json.loads(ask("submit runs/run.yaml --nodes 2 --time 10m --dry-run --json").out)
    assert (told["run"], told["file"], told["job"]) == ("runs/line", "runs/line/job.sbatch", "")
    assert told["reasons"][0].startswith("2 nodes × 1 rank: asked for")
    subprocess.run(["/bin/bash", "-n"], input=told["script"], text=True, check=True)


def test_logs_of_all_jobs_or_of_one(sent, ask):
    told = json.loads(ask("logs runs/small --json").out)
    assert [(each["job"], each["text"]) for each in told] == [("7", "first\n"), ("8", "second \x1b[2J\n")]
    assert told[0]["log"] == str(sent.path / "slurm-7.out")
    assert [each["job"] for each in json.loads(ask("logs 8 --json").out)] == ["8"]
    shown = ask("logs runs/small").out
    assert "── job 7\nfirst\n── job 8\nsecond " in shown
    assert "\x1b" not in shown
    refused = ask("logs 8 --json -f")
    assert (refused.code, "--follow" in refused.err) == (2, True)


def test_a_queue_that_does_not_answer_is_not_taken_for_an_empty_one(sent, tmp_path, ask):
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\necho slurm_load_jobs error: Unable to contact >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    for words in ("cancel runs/small", "logs 8 -f"):
        told = ask(words)
        assert told.code == 2
        assert "Slurm does not answer here (slurm_load_jobs error: Unable to contact); type this on" in told.err
    assert "cancel" not in sent.jobs_file.read_text()


def test_without_slurm_nothing_is_cancelled(sent, ask):
    told = ask("cancel runs/small --json")
    assert (told.code, "there is no Slurm here" in told.err) == (2, True)
    assert "cancel" not in sent.jobs_file.read_text()
