"""Scripts that know nothing of being measured: what is seen of them, what is refused, and that they do not change."""

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch
from outside_scenarios import EXAMPLES, SCENARIOS, STEPS

import paceline
from conftest import REPOSITORY
from paceline.errors import RunFailed, UserError
from paceline.measurement.diagnosis import FROM_OUTSIDE
from paceline.measurement.result import read_measurement
from paceline.measurement.scripts.command import RecordRequest
from paceline.measurement.scripts.measure_command import collect_script_notes, read_script_times
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trials.runner import AbortTrials

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(4000, 16))
net = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for (x,) in DataLoader(data, batch_size=24 // dist.get_world_size(), sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
raise SystemExit("the script was left to go on")
"""


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenarios")
    script = REPOSITORY / "tests" / "dist" / "outside_scenarios.py"
    path = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run([sys.executable, str(script), str(folder)], env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def seen(scenarios):
    def read(name):
        code = max(int(line) for line in (scenarios / name / "codes").read_text().split())
        request = RecordRequest(str(scenarios / name), STEPS, SCENARIOS[name].ranks)
        return read_script_times(scenarios / name, request, code)

    return read


def steps_of(scenarios, name, rank=0):
    return read_steps(RunDir(scenarios / name).events_file(rank))


def test_accumulated_batches_add_up(scenarios, seen):
    times = seen("accumulating")
    assert times.seen.rank_batches == (16,)
    steps = steps_of(scenarios, "accumulating")
    assert min(rates := [16 / step["step_s"] for step in steps]) <= times.samples_per_s <= max(rates)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert 0 < step["data_s"] < step["step_s"]
        assert step["compute_s"] + step["data_s"] == pytest.approx(step["step_s"])
    assert times.workers == 0
    assert times.peak_bytes_per_rank[0] > 1e7


@pytest.mark.parametrize("name", ["wrapped_optimizer", "two_optimizers"])
def test_a_step_is_counted_once(scenarios, seen, name):
    assert len(steps_of(scenarios, name)) == STEPS
    assert seen(name).seen.rank_batches == ()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "asynchronous"])
def test_collectives_are_seen(scenarios, seen, name):
    times = seen(name)
    assert len(times.busy_s_by_rank) == 2
    steps = [step for rank in range(2) for step in steps_of(scenarios, name, rank)]
    for step in steps:  # whoever comes last may find all of it done
        assert 0 <= step["exposed_s"] <= step["comm_s"] <= step["step_s"]
        assert step["comm_s"] > 0
    assert sum(step["exposed_s"] for step in steps) > 0
    assert not times.seen.aside


@pytest.mark.parametrize(("name", "noted"), [("by_themselves", True), ("ddp", False), ("accumulating", False)])
def test_ranks_that_exchange_nothing_are_noted(seen, name, noted):
    assert any("no communication" in note for note in collect_script_notes([seen(name)], STEPS)) == noted


def test_a_measured_script_computes_the_same(scenarios):
    assert (scenarios / "ddp_alone" / "codes").read_text() == "0\n0\n"
    for rank in range(2):
        for step in range(STEPS + 1):
            name = f"weights{rank}-{step}.pt"
            with_hooks, without = (torch.load(scenarios / run / name) for run in ("ddp", "ddp_alone"))
            assert all(torch.equal(with_hooks[key], without[key]) for key in without)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("no_step", AbortTrials, "without a training step"),
        ("short", AbortTrials, "after 3 steps of 7"),
        ("failing", RunFailed, "exit code 1: ValueError"),
        ("each_by_itself", UserError, "no process group"),
        ("three_ranks", UserError, "joined 3"),
    ],
)
def test_what_cannot_be_measured_is_said(seen, name, kind, said):
    with pytest.raises(kind, match=said) as raised:
        seen(name)
    assert type(raised.value) is kind


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    (folder / "train.py").write_text(SCRIPT)
    words = ["measure", "--ranks", "1,2", "--steps", "8", "--repeats", "1", "--out", str(folder / "out"), "--"]
    return [*words, sys.executable, str(folder / "train.py")], folder / "out"


def test_the_command_and_its_report(measured, ask, tmp_path):
    words, folder = measured
    for _ in range(2):  # the second time there is nothing left to do
        shown = ask(*words)
        assert shown.code == 0, shown.err
        assert "strong scaling, the same batch" in shown.out
        assert max(map(len, shown.out.splitlines())) <= 100 or "written" in max(shown.out.splitlines(), key=len)
    assert shown.err == ""
    found = read_measurement(folder)
    assert found.notes[0].startswith(FROM_OUTSIDE)
    one, two = found.rows
    assert one.batch.layout == "24 samples = 24 per rank × 1 rank"
    assert two.batch.layout == "24 samples = 12 per rank × 2 ranks"
    assert two.outside
    assert two.parts.comm_s > 0 == one.parts.comm_s
    assert (folder / "2-ranks-1" / "output.txt").read_text() == ""
    made = paceline.report([folder], tmp_path / "report")
    page = (made.folder / "report.md").read_text()
    assert FROM_OUTSIDE in page
    assert "train.py" in page
    assert not made.contents.left_out
    refused = ask(*words, "--lr", "1")
    assert (refused.code, "command=" in refused.err) == (2, True)


@pytest.mark.parametrize("origin", ["accelerate", "lightning"])
def test_frameworks_are_measured_as_they_are(scenarios, seen, origin):
    times = seen(origin)
    assert times.seen.rank_batches == (32,)  # two batches of 16 are accumulated
    assert len(steps_of(scenarios, origin)) == STEPS


def test_the_programs_of_the_pages_run_before_and_after(scenarios, monkeypatch, capsys, tmp_path):
    for file in EXAMPLES.glob("*_after.*"):
        (tmp_path / file.name).write_text(file.read_text().replace("micro_batch: 16", "micro_batch: 16, threads: 1"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("accelerate_after.py", run_name="__main__")
    after = {"accelerate": accuracy(capsys.readouterr().out)}
    after["lightning"] = paceline.train("lightning_after.yaml", show=False).summary.evaluation.metrics["accuracy"]
    for origin, found in after.items():
        before = accuracy((scenarios / f"{origin}_alone" / "output.txt").read_text())
        assert found == pytest.approx(before, abs=0.06)
        assert before > 0.8


def accuracy(printed):
    return float(re.findall(r"accuracy (\d\.\d+)", printed)[-1])
