"""What is shown fits, is plain where it must be, follows the run, and counts its pauses as the loop makes them."""

import contextlib
import io
import math
import os
import pty
import re
import subprocess
import sys

import pytest

from paceline.config import Train
from paceline.io.format import clock, duration, number, size, to_encodable
from paceline.runlog import progress as module
from paceline.runlog.progress import PauseSchedule, Progress
from paceline.trainer.loop import is_due


def step(number, **values):
    times = {"step_s": 0.1, "data_s": 0.001, "compute_s": 0.091, "comm_s": 0.03, "exposed_s": 0.008}
    return {"kind": "step", "step": number, "samples": number * 100, "loss": 0.5, "batch": 100, **times, **values}


class Time:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_plain_lines(monkeypatch):
    time, out = Time(monkeypatch), io.StringIO()
    with Progress(1000, stream=out) as progress:
        progress.say("128 global = 16 per pass × 4 ranks")
        for number in range(1, 11):
            time.now += 0.5
            progress.step(step(number))
        progress.show_evaluation(
            {"kind": "evaluate", "t": 1.0, "step": 10, "n": 7600, "loss": 0.31239, "accuracy": 0.9112}
        )
    assert out.getvalue().splitlines() == [
        "128 global = 16 per pass × 4 ranks",
        " 10 %  eta 0:01  step 1  1,000 samples/s  loss 0.5000  compute 91 % data 1 % exposed 8 %",
        " 50 %  eta 0:02  step 5  200 samples/s  loss 0.5000  compute 91 % data 1 % exposed 8 %",
        " 90 %  eta 0:00  step 9  200 samples/s  loss 0.5000  compute 91 % data 1 % exposed 8 %",
        "evaluated at step 10 on 7,600 samples: loss 0.3124, accuracy 0.9112",
        "100 %  took 0:05  step 10  200 samples/s  loss 0.5000  compute 91 % data 1 % exposed 8 %",
    ]


def test_a_long_run_logs_less_often(monkeypatch):
    time, out = Time(monkeypatch), io.StringIO()
    with Progress(10**9, stream=out) as progress:
        for number in range(1, 24 * 360):
            time.now += 10
            progress.step(step(number))
    lines = out.getvalue().splitlines()
    assert 1000 < len(lines) < 2000


def test_the_eta_counts_evaluations_and_checkpoints_and_the_rate_does_not(monkeypatch):
    """20 steps of 1 s, an evaluation of 6 s and a checkpoint of 1 s after each 5."""
    time, out = Time(monkeypatch), io.StringIO()
    with Progress(2000, stream=out, pauses=PauseSchedule(20, 5, 5, evaluated=1800)) as progress:
        for number in range(1, 18):
            time.now += 1
            progress.step(step(number, step_s=1.0))
            if number % 5 == 0:
                time.now += 7
                progress.show_evaluation({"step": number, "n": 1800, "loss": 0.1, "evaluate_s": 6.0})
                progress.saved({"step": number, "checkpoint_s": 1.0})
        progress.ended({})
    lines = [line for line in out.getvalue().splitlines() if "%" in line]
    assert all(" 100 samples/s " in line for line in lines)
    assert "eta 0:43" in lines[0], "19 steps, and 4 evaluations at a third of what the training takes"
    assert "eta 0:35" in next(line for line in lines if "step 6 " in line), "14 steps, 3 × (6 + 1)"
    assert "step 17" in lines[-1]
    assert "took 0:38" in lines[-1]


def test_one_rank_has_nothing_exposed_and_nan_is_said():
    out = io.StringIO()
    with Progress(1000, stream=out) as progress:
        progress.step(step(1, comm_s=0.0, exposed_s=0.0, loss=math.nan))
        progress.step({"step": 3, "samples": 300, "comm_s": None, "loss": None})
    first, last = out.getvalue().splitlines()
    assert first.endswith("loss nan  compute 91 % data 1 %")
    assert "  step 3  " in last


def test_going_back_starts_a_new_window(monkeypatch):
    time, out = Time(monkeypatch), io.StringIO()
    with Progress(10_000, stream=out) as progress:
        for number in (50, 51, 20, 21):
            time.now += 2
            progress.step(step(number))
    shown = [("50", "1,000"), ("51", "50"), ("20", "1,000"), ("21", "50")]
    assert re.findall(r"step (\d+)  ([\d,]+) samples", out.getvalue()) == shown


def test_an_unusual_stream_does_not_end_the_run():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress(1000, stream=out) as progress:
        progress.say("16 × 4 ≈ 60 \N{SNOWMAN}")
        progress.step(step(1))
        out.seek(0)
        assert out.readline() == "16 x 4 ~ 60 ?\n"
        out.close()
        progress.step(step(2))
        progress.say("nobody hears this")


SCRIPT = """
import sys
from paceline.runlog.progress import Progress
with Progress(1000) as progress:
    for number in range(1, 11):
        progress._drawn = 0
        progress.step({"step": number, "samples": number * 100, "loss": 0.5, "step_s": 0.1, "compute_s": 0.1})
        if number == 5:
            print("a word in between")
            progress.say("[message] that stays")
print("done", "rich" in sys.modules)
"""


def in_terminal(**environment):
    ours, theirs = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")}
    env = {**clean, "COLUMNS": "90", "LINES": "20", "PYTHONIOENCODING": "utf-8", **environment}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, stdin=theirs, env=env)
    os.close(theirs)
    written = bytearray()
    with contextlib.suppress(OSError):  # its end is closed
        while chunk := os.read(ours, 4096):
            written.extend(chunk)
    assert process.wait(timeout=120) == 0
    os.close(ours)
    return written.decode()


def test_a_narrow_terminal_cuts_the_end_of_the_line():
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", in_terminal(TERM="xterm-256color", COLUMNS="40"))
    lines = [line for line in re.split(r"[\r\n]+", plain) if "%" in line]
    assert all(len(line) <= 40 and line.endswith("…") for line in lines)
    assert "100 % ━━━━━━━━━━━━━━━━  took 0:00  " in plain


@pytest.mark.parametrize("colour", [{}, {"NO_COLOR": "1"}])
def test_on_a_terminal_one_line_is_drawn_over(colour):
    written = in_terminal(TERM="xterm-256color", **colour)
    assert bool(re.search(r"\x1b\[[\d;]*3\dm", written)) == (not colour)
    assert written.count("\x1b[2K") >= 10
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", written)
    visible = [line for line in re.split(r"[\r\n]+", plain) if line and "%" not in line]
    assert visible == ["a word in between", "[message] that stays", "done True"]
    assert "100 % ━━━━" in plain


def test_a_dumb_terminal_and_a_pipe_get_plain_lines_even_if_colour_is_forced():
    for term in ("dumb", ""):
        written = in_terminal(TERM=term)
        assert "\x1b" not in written
        assert "100 %  took 0:00  step 10" in written
        assert written.endswith("done False\r\n")
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "TTY_COMPATIBLE": "1"}
    written = subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment).decode()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", written)
    assert written.endswith("done False\n")


def test_units():
    given = (0, 1234567, 0.87314, 12.5, 1234.56, 3.21e-6, None, -math.inf)
    assert [*map(number, given)] == ["0", "1,234,567", "0.8731", "12.5", "1,235", "3.21e-06", "nan", "-inf"]
    given = (0.0004, 0.0482, 0.9999, 12.34, 59.99, 7500, 86400 * 4.25)
    assert [*map(duration, given)] == ["400 µs", "48.2 ms", "1.0 s", "12.3 s", "1 min 00 s", "2 h 05 min", "4 d 06 h"]
    assert [*map(clock, (0.2, 59.9, 3599.6, 7510, 86400))] == ["0:00", "1:00", "1:00:00", "2:05:10", "1 d 00 h"]
    assert [*map(size, (12, 999_900, 812e6, 1.25e9, 3e13))] == ["12 B", "1 MB", "812 MB", "1.25 GB", "30 TB"]
    assert to_encodable("é ×", None) == "é ×"


@pytest.mark.parametrize("every", [0, 1, 4, 7, 100])
@pytest.mark.parametrize("steps", [1, 12, 20, 21])
def test_as_many_are_to_come_as_the_loop_makes(every, steps):
    train = Train(evaluate_every=every, checkpoint_every=every)
    pauses = PauseSchedule.of(train, steps, steps_per_epoch=6, evaluated=30)
    for done in range(steps + 1):
        made = [step for step in range(done + 1, steps + 1) if step == steps or is_due(step, every, step % 6 == 0)]
        assert pauses.evaluations(done) == pauses.checkpoints(done) == len(made)
