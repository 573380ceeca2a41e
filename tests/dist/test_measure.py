"""Sweeps with real ranks: rows, a failed cell, going on after a stop, and causes found because they are there."""

import json
import os
import shutil
import textwrap
from unittest import mock

import pytest
from torch.profiler import ProfilerActivity, profile

from paceline import train
from paceline.config import load
from paceline.io.files import read_json, write_json
from paceline.launch.local import run_ranks
from paceline.measurement.links import COLLECTIVES, compute_link_factor, time_collectives
from paceline.measurement.measure import measure
from paceline.measurement.recalibration import update_calibration
from paceline.measurement.result import read_measurement
from paceline.measurement.rows import FailedRow, drop_failed
from paceline.planner.calibration import calibrate
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.runlog.timers import sum_union
from paceline.trainer.run import PRELOAD
from results import expect_error

pytestmark = pytest.mark.usefixtures("warm_ranks")

WORKLOAD = """
import os, time
import numpy as np, torch
from paceline import Workload

X = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))

class Rows:
    slow_s = 0.0
    def __len__(self): return len(X)
    def cost(self, ids): return np.ones(len(ids))
    def batch(self, ids, keys):
        time.sleep(self.slow_s)
        return X[ids]

class SlowRows(Rows):
    slow_s = 0.1

class Plain(Workload):
    rows = Rows
    def model(self): return torch.nn.Linear(8, 1)
    def data(self, split): return self.rows() if split == "train" else None
    def loss(self, model, x):
        time.sleep(0.02 * float(os.environ.get("SLOWER", 1)))  # as a device would work
        return ((model(x)[:, 0] - x.sum(1)) ** 2).sum(), len(x)

class SlowInput(Plain):
    rows = SlowRows

class SlowRank(Plain):
    def loss(self, model, x):
        time.sleep(0.12 if os.environ.get("RANK") == "1" else 0.0)
        return super().loss(model, x)
"""


def comm_twice(spec, out):
    """(time with a collective of training in flight by our own events, the same by torch's profiler)."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = train(spec, out, show=False)
    flights = [e.time_range for e in profiler.events() if e.name == "gloo:all_reduce"]
    steps = read_steps(RunDir(result.path).events_file(int(os.environ["RANK"])))
    theirs = sum_union([(flight.start / 1e6, flight.end / 1e6) for flight in flights])
    return sum(step["comm_s"] for step in steps), theirs


def links_between_hosts(sizes_bytes):
    """As on one host for each rank."""
    with mock.patch("socket.gethostname", return_value=f"host{os.environ['RANK']}"):
        return time_collectives(sizes_bytes)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workload")
    (folder / "work.py").write_text(textwrap.dedent(WORKLOAD))

    def written(kind):
        file, head = folder / f"{kind}.yaml", f"name: {kind.lower()}\nworkload: work.py:{kind}\n"
        file.write_text(f"{head}train: {{epochs: 3, global_batch: 40, lr: 0.05}}\nparallel: {{threads: 1}}\n")
        return file

    return written


@pytest.fixture(scope="module")
def run_file(file_of):
    return lambda kind: load(file_of(kind))


@pytest.fixture(scope="module")
def swept(run_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "plain-measure"
    return measure(run_file("Plain"), [1, 2], layouts=["tensor:2"], steps=12, repeats=1, price=3.0, out=out)


def test_a_sweep_has_rows_with_all_that_was_measured(swept):
    one, two, failed = swept.rows
    assert (one.label, two.label, failed.label) == ("1 rank", "2 ranks", "tensor:2")
    for row in (one, two):
        assert row.step_s > 0.02
        run = RunDir(swept.folder / row.runs[0])
        steps = [step for rank in range(row.ranks) for step in read_steps(run.events_file(rank))]
        for step in steps:
            parts = step["compute_s"] + step["data_s"] + step["exposed_s"]
            assert parts == pytest.approx(step["step_s"]) or (parts > step["step_s"] and step["compute_s"] == 0)
        for name in ("step_s", "compute_s", "data_s", "comm_s", "exposed_s"):
            taken = [step[name] for step in steps]
            found = row.step_s if name == "step_s" else getattr(row.parts, name)
            assert min(taken) <= found <= max(taken)
        assert row.loads.peak_bytes_per_rank[0] > 1e7
        assert len(row.loads.peak_bytes_per_rank) == row.ranks
        assert row.cost.cost_usd == pytest.approx(row.cost.device_hours * 3.0)
    assert one.speedup == 1.0
    assert two.parts.comm_s > 0
    assert two.compute_over_comm == pytest.approx(two.parts.compute_s / two.parts.comm_s)
    assert two.loads.slowest.rank in (0, 1)
    assert swept.total_samples == 3 * 400
    assert failed.failed.startswith("parallel.tensor=2")
    assert isinstance(failed, FailedRow)
    assert len(swept.verdict) == 3
    again = read_measurement(swept.folder)
    assert (again.rows, again.laws, again.findings) == (swept.rows, swept.laws, swept.findings)
    assert read_json(swept.file)["rows"][1]["efficiency"] == pytest.approx(two.speedup / 2)


def test_real_ranks_correct_a_real_calibration(swept, tmp_path):
    file = tmp_path / "calibration.json"
    write_json(file, calibrate.calibrate_machine([1, 2], lambda text: None, threads=1, enough_s=0.01))
    correction, planned = update_calibration(swept.folder, file)
    assert [row.ranks for row in correction.rows] == [1, 2]
    assert [row.label for row in planned] == ["1 rank", "2 ranks"]
    for row, plan in zip(swept.rows, planned, strict=False):
        assert plan.after_s == pytest.approx(row.parts.compute_s + row.parts.exposed_s + row.other_s, rel=0.05)


def test_nothing_is_done_twice(swept, run_file, tmp_path):
    """Started again: one more repeat of the rows that worked, and no other run. A half-done run is done anew."""
    folder = tmp_path / swept.folder.name
    shutil.copytree(swept.folder, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*-1/summary.json")}
    assert len(before) == 2
    (folder / "2-ranks-2").mkdir()
    (folder / "2-ranks-2" / "spec.yaml").write_text("of a sweep that was killed")
    said = []
    found = measure(run_file("Plain"), [1, 2], layouts=["tensor:2"], steps=12, repeats=2, out=folder, log=said.append)
    assert [line.split(":")[0] for line in said] == ["2 ranks", "1 rank"]  # the second round goes the other way
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [row.repeats for row in drop_failed(found.rows)] == [2, 2]
    said.clear()
    measure(run_file("Plain"), [1, 2], steps=12, repeats=2, out=folder, log=said.append)
    assert said == []


def test_another_measurement_is_not_mixed_in(swept, run_file):
    for key, overrides, steps in (("steps", {}, 30), ("train.lr", {"train.lr": 0.1}, 12)):
        with expect_error("conflict", key):
            measure(run_file("Plain").replace(overrides), [1, 2], steps=steps, out=swept.folder)


def test_a_slow_source_and_a_slow_rank_are_found(run_file, tmp_path):
    slow_input = run_file("SlowInput").replace({"data.workers": 0})
    found = measure(slow_input, [1], steps=12, repeats=1, out=tmp_path / "input")
    (finding,) = found.findings
    assert finding.cause == "input", finding.text
    assert "(now 0): one process takes" in finding.advice
    found = measure(run_file("SlowRank"), [1, 2], steps=12, repeats=1, out=tmp_path / "rank")
    finding = next(f for f in found.findings if f.label == "2 ranks")
    assert finding.cause == "slow rank", finding.text
    assert "rank 1 works" in finding.text
    assert found.rows[1].loads.slowest.rank == 1


def test_links_between_two_ranks():
    links = run_ranks(time_collectives, ((1_000, 100_000, 4_000_000),), 2)[0]
    assert [link.collective for link in links] == list(COLLECTIVES)
    for link in links:
        assert len(link.seconds) == 3
        assert 1e-6 < link.latency_s < 1
        assert 1e6 < link.bandwidth_bits_s < 1e13
    assert compute_link_factor("all_reduce", 2) == 1.0
    assert compute_link_factor("all_gather", 4) == 0.75


def test_every_pair_of_hosts_is_written_down():
    links = run_ranks(links_between_hosts, ((1_000, 10_000),), 3)[0]
    pairs = [link.between for link in links if link.between != "all ranks"]
    assert pairs == ["host0 and host1", "host0 and host2", "host1 and host2"]


@pytest.fixture(scope="module")
def timed_twice(small, tmp_path_factory):
    """(ours, the profiler's) of each rank: with more weights than usual, so that collectives take a while."""
    spec = small.replace({"parallel.ranks": 2, "model.width": 256, "model.ffn": 1024, "train.steps": 10})
    return run_ranks(comm_twice, (spec, tmp_path_factory.mktemp("twice")), 2, PRELOAD)


def test_our_times_cover_what_the_profiler_sees(timed_twice):
    """The same run, timed by the loop and by torch. On a busy machine our marks wait for their turn and are late."""
    for ours, theirs in timed_twice:
        assert 0 < theirs < 1.1 * ours


@pytest.mark.timing
def test_our_times_agree_with_the_profiler(timed_twice):
    for ours, theirs in timed_twice:
        assert ours == pytest.approx(theirs, rel=0.1)


def test_the_command(file_of, ask, swept):
    file = file_of("Plain")
    answer = ask("measure", file, "--ranks", "1,2", "--steps", 12, "--repeats", 1, "--out", swept.folder)
    assert (answer.code, "speed-up" in answer.out) == (0, True)
    lines = answer.out.splitlines()
    assert max(map(len, lines)) <= 100 or "written" in max(lines, key=len)
    for words, said in (
        (["--ranks", "2,4"], "one rank"),
        (["--ranks", "0"], "--ranks"),
        (["--steps", "2"], "--steps"),
        (["--price", "-1"], "--price"),
        (["--out", "/proc/nothing/here"], "cannot be a folder"),
    ):
        answer = ask("measure", file, *words)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert said in answer.err


def test_a_baseline_is_written_then_compared_with(file_of, tmp_path, monkeypatch, ask):
    command = ["measure", file_of("Plain"), "--ranks", 1, "--steps", 8, "--repeats", 1, "--json"]
    command += ["--baseline", tmp_path / "gate.json"]
    assert ask(*command).code == 0
    monkeypatch.setenv("SLOWER", "12")  # a busy machine may have slowed the baseline too
    slower = ask(*command)
    (found,) = json.loads(slower.out)["regressions"]
    assert (slower.code, found["label"], found["term"], found["cause"]) == (1, "1 rank", "step_s", "compute_s")
    other = ask(*command, "train.lr=0.04")
    assert (other.code, "train.lr" in other.err) == (2, True)
