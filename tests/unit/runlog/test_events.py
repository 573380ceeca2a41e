"""Events are whole lines, survive kills, and count each step once."""

import json
import math
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import RunFailed
from paceline.runlog.events import (
    EventWriter,
    drop_undone_steps,
    extract_metrics,
    read_event_lines,
    read_events,
    read_steps,
)
from paceline.runlog.machine import describe_environment

STEP = {"epoch": 0, "samples": 128, "skipped": False, "loss": 1.23456789, "lr": 0.00123, "step_s": 0.0123456}


def test_events_come_back_in_order(tmp_path):
    file = tmp_path / "events" / "rank0.jsonl"
    before = time.time()
    with EventWriter(file) as events:
        events.write("start", host="é\nx", argv=["a", Path("b")])
        events.write("step", step=1, **STEP)
    start, step = read_events(file)
    assert (start["kind"], start["host"], start["argv"]) == ("start", "é\nx", ["a", "b"])
    assert before - 1e-5 <= start["t"] <= time.time()
    assert {key: step[key] for key in STEP} == STEP
    assert list(read_events(file, "step")) == [step]


def test_steps_are_held_until_flush_and_other_events_take_them_along(tmp_path):
    file = tmp_path / "a.jsonl"

    def written():
        return [event["kind"] for event in read_events(file)]

    events = EventWriter(file)
    events.write("step", step=1)
    assert written() == []
    events.flush()
    events.write("step", step=2)
    assert written() == ["step"]
    events.write("checkpoint", step=2)
    events.write("step", step=3)
    assert written() == ["step", "step", "checkpoint"]
    events.close()
    events.close()
    assert len(written()) == 4


def test_what_is_not_finite_is_null(tmp_path):
    file, single = tmp_path / "a.jsonl", np.float32
    with EventWriter(file) as events:
        events.write("step", step=1, loss=math.nan, lr=single(0.5), nested={"a": [single("nan"), math.inf]})
    (event,) = map(json.loads, file.read_text().splitlines())
    assert (event["loss"], event["lr"], event["nested"]) == (None, 0.5, {"a": [None, None]})


def test_a_torn_line_is_healed_and_passed_over(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"kind":"step","t":1.0,"step":1}\n{"kind":"step","t":2.0,"st')
    with EventWriter(file) as events:
        events.write("resume", step=1)
    assert [(event["kind"], event["step"]) for event in read_events(file)] == [("step", 1), ("resume", 1)]
    assert "\n\n" not in file.read_text()
    good = b'{"kind":"step","step":1}\n'
    file.write_bytes(b'\x00\x00\n\xff\xfe{"kind"\n[1]\n12\n{}\n\n' + b"[" * 100_000 + b"\n" + good + b'{"kind":"end"}')
    assert [event["kind"] for event in read_events(file)] == ["step", "end"]
    assert read_steps(tmp_path / "rank7.jsonl") == [], "of a rank that wrote nothing"


def test_events_that_would_go_nowhere_are_a_failure(tmp_path):
    events = EventWriter(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(RunFailed, match=r"a\.jsonl was removed"):
        events.write("resume")
    if os.path.exists("/dev/full"):
        with pytest.raises(RunFailed, match="/dev/full: No space left"):
            EventWriter(Path("/dev/full")).write("start")


def test_a_later_attempt_replaces_the_earlier_one(tmp_path):
    file = tmp_path / "a.jsonl"
    with EventWriter(file) as events:
        for step in range(1, 8):
            events.write("step", step=step, loss=1.0)
    with EventWriter(file) as events:
        events.write("resume", step=4)
    assert [step["step"] for step in read_steps(file)] == [1, 2, 3, 4]
    with EventWriter(file) as events:
        for step in (5, 6):
            events.write("step", step=step, loss=2.0)
        events.write("evaluate", step=6, n=10, loss=0.5)
        events.write("step", step=None)
    losses = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 2.0}
    assert [(step["step"], step["loss"]) for step in read_steps(file)] == list(losses.items())
    with EventWriter(file) as events:  # its resume event was lost
        events.write("step", step=2)
    assert [step["step"] for step in read_steps(file)] == [1, 2]
    again = [{"kind": "evaluate", "step": 10}, {"kind": "evaluate", "step": 20}, {"kind": "resume", "step": 15}]
    assert drop_undone_steps(again, "evaluate") == again[:1]


def test_of_a_long_file_no_spike_and_no_other_event_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.runlog.events.RECENT_BYTES", 20_000)
    file = tmp_path / "a.jsonl"
    with EventWriter(file) as events:
        events.write("start")
        for step in range(1, 20_001):
            loss = {5_000: 99.0, 7_000: None, 9_000: -99.0}.get(step, 1.0 + step % 7)
            events.write("step", step=step, loss=loss, **({"compiled": True} if step == 77 else {}), pad="x" * 300)
            if step % 1000 == 0:
                events.write("evaluate", step=step, loss=1.0)
    lines = list(read_event_lines(file, most_steps=1000))
    whole = dict(read_event_lines(file))
    assert len(lines) < 1500
    assert all(whole[number] == event for number, event in lines)
    assert sum(event["kind"] == "evaluate" for _, event in lines) == 20
    kept = {event["step"] for _, event in lines if event["kind"] == "step"}
    assert {1, 77, 5_000, 7_000, 9_000, *range(19_960, 20_001)} <= kept
    assert len(read_steps(file)) == 20_000
    assert len(read_steps(file, most=10**6)) == 20_000


def test_metrics_flat_or_nested():
    flat = {"kind": "evaluate", "t": 1.0, "step": 3, "n": 10, "loss": 0.5, "accuracy": 1, "best": True, "note": "x"}
    assert extract_metrics(flat) == {"loss": 0.5, "accuracy": 1.0}
    assert extract_metrics({"step": 3, "metrics": {"loss": 0.5}}) == {"loss": 0.5}
    assert math.isnan(extract_metrics({"loss": None})["loss"])


def test_environment_names_the_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for whose in ("GLOBAL", "SYSTEM"):  # hooks, signatures and templates of whoever runs the tests
        monkeypatch.setenv(f"GIT_CONFIG_{whose}", os.devnull)
    assert describe_environment()["commit"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    assert describe_environment()["commit"] == head
    (tmp_path / "a").write_text("2")
    assert describe_environment()["commit"] == f"{head}-dirty"
    # the folder may have come from anywhere, and settings of a repository are commands
    mark = tmp_path.parent / "executed"
    subprocess.run([*git, "config", "core.fsmonitor", f"touch {mark}"], check=True)
    assert describe_environment()["commit"] == f"{head}-dirty"
    (tmp_path / ".gitattributes").write_text("* filter=x\n")
    subprocess.run([*git, "config", "filter.x.clean", f"touch {mark}"], check=True)
    assert describe_environment()["commit"] == head
    assert not mark.exists()
