"""What a run folder says of its jobs, and whether it wants another attempt."""

import subprocess
import sys

import pytest

from paceline.planner.emit import REQUEUE_CODE
from paceline.runlog.events import EventWriter, sum_wall_seconds
from paceline.runlog.jobs import (
    NextAttempt,
    decide_next_attempt,
    detect_scheduler_job,
    is_job_id,
    list_job_ids,
    record_job_event,
)
from paceline.runlog.run_dir import RunDir


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "line")
    found.checkpoints.mkdir(parents=True)
    return found


def attempt(run, *, step=0, status=None, why="", job="7"):
    """The traces of one: a start, a checkpoint, and an end where it came to say so."""
    with EventWriter(run.events_file(0)) as events:
        events.write("start", job=job, ranks=2)
        if step:
            (run.checkpoints / f"step-{step:08d}").mkdir()
        if status:
            events.write("end", status=status, why=why)


def ended(run, asked=""):
    """What follows, noted as the batch script notes it."""
    found = decide_next_attempt(run, asked, attempts=3, job="7")
    record_job_event(run, "ended", job="7", step=found.step, next=found.next, why=found.why)
    return found


def test_a_finished_run_is_done_whatever_came_last(run):
    attempt(run, step=9, status="finished")
    assert [ended(run, asked).next for asked in ("", "USR1", "TERM")] == [NextAttempt.DONE] * 3


def test_the_time_limit_leads_to_another_job_for_as_long_as_there_is_progress(run):
    for step in (10, 20, 30, 40, 50):
        attempt(run, step=step, status="stopped")
        found = ended(run, "USR1")
        assert (found.next, found.step) == (NextAttempt.AGAIN, step)
        assert found.why == f"the time limit is near; the next one resumes from step {step}"
    attempt(run, step=60)
    assert ended(run, "LIMIT").next == NextAttempt.AGAIN


def test_a_crash_loop_ends_with_the_reason(run):
    attempt(run, step=10, status="failed", why="a bad sample")
    assert ended(run).next == NextAttempt.AGAIN
    for expected in (NextAttempt.AGAIN, NextAttempt.AGAIN, NextAttempt.ENOUGH):
        attempt(run, status="failed", why="a bad sample")
        found = ended(run)
        assert found.next == expected
    assert found.why == "3 attempts in a row came no further than step 10: a bad sample"
    record_job_event(run, "submit", job="8")  # somebody has mended it and sends it again
    attempt(run)
    assert ended(run).next == NextAttempt.AGAIN


def test_machines_that_are_taken_away_are_nobodys_failure(run):
    for _ in range(5):
        attempt(run, status="stopped")
        assert ended(run, "TERM").next == NextAttempt.LEFT
    attempt(run)
    assert ended(run).next == NextAttempt.AGAIN


def test_a_cancelled_job_is_not_tried_again_but_another_one_is(run):
    attempt(run, step=10, status="stopped")
    record_job_event(run, "cancel", job="7")
    assert decide_next_attempt(run, "USR1", job="7").next == NextAttempt.LEFT
    assert decide_next_attempt(run, "USR1", job="8").next == NextAttempt.AGAIN


def test_ranks_that_came_further_are_started_again_in_their_job(run):
    attempt(run, step=10, status="failed")
    assert decide_next_attempt(run, "", here=True).next == NextAttempt.HERE
    assert decide_next_attempt(run, "USR1", here=True).next == NextAttempt.AGAIN, "the job ends"
    record_job_event(run, "ended", step=10, next=NextAttempt.HERE)
    assert decide_next_attempt(run, "", here=True).next == NextAttempt.AGAIN, "other nodes may do better"


def test_a_folder_knows_its_jobs_and_reads_them_as_data(run):
    record_job_event(run, "submit", job="12")
    attempt(run, job="12")
    attempt(run, job="13")
    record_job_event(run, "submit", job="$(id)")
    record_job_event(run, "submit", job=["14"])
    with open(run.jobs_file, "ab") as file:
        file.write(b'{"kind":"ended","job":\n\xff\n[1]\n')
    assert list_job_ids(run) == ["12", "13"]
    assert is_job_id("12_3")
    assert not any(map(is_job_id, ("12;id", "١٢", "")))


def test_the_exit_code_of_a_decision_does_not_need_a_log_that_can_be_written(run):
    run.path.joinpath("spec.yaml").write_text("name: line\n")
    attempt(run, step=10, status="stopped")
    command = [sys.executable, "-m", "paceline.slurm.requeue", str(run.path), "--asked", "USR1"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full).returncode == REQUEUE_CODE


def test_what_was_used_is_counted_over_all_attempts(run):
    lines = [("start", 0, 2), ("step", 10, 0), ("start", 100, 1), ("step", 130, 0)]
    run.events.mkdir()
    text = "".join(f'{{"kind":"{kind}","t":{t},"ranks":{ranks}}}\n' for kind, t, ranks in lines)
    run.events_file(0).write_text(text)
    assert sum_wall_seconds(run.events_file(0), per_rank=True) == 10 * 2 + 30 * 1


def test_the_job_of_this_process():
    assert detect_scheduler_job({}) == {}
    assert detect_scheduler_job({"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "2"}) == {"job": "5", "restarts": 2}
    array = {"SLURM_JOB_ID": "6", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    assert detect_scheduler_job(array)["job"] == "5_1"
