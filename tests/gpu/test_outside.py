"""Scripts on CUDA devices that know nothing of being measured."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.measurement.scripts.buckets import TimedGroup
from paceline.measurement.scripts.command import RecordRequest
from paceline.measurement.scripts.step_recorder import StepRecorder
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(512, 4096), nn.Linear(4096, 512)).cuda())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    net(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
"""


def test_ranks_that_share_a_device_are_measured(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "train.py")]
    found = paceline.measure_command(words, [2], steps=8, repeats=1, out=tmp_path / "out")
    assert found.rows[0].parts.comm_s > 0
    for rank in range(2):
        for step in read_steps(RunDir(tmp_path / "out" / "2-ranks-1").events_file(rank)):
            assert 0 < step["exposed_s"] <= step["comm_s"] <= step["step_s"]


def test_buckets_of_nccl_are_marked_on_the_device(tmp_path):
    """On one rank, where a script's own group would be left alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        notes = StepRecorder(RecordRequest(str(tmp_path), 1 << 30, 1))
        net = DistributedDataParallel(nn.Linear(2048, 2048).cuda())
        group = TimedGroup(net.process_group, notes)
        net.reducer._update_process_group(group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(8, 2048, device="cuda")).sum().backward()
            notes.optimizer_ended(optimizer)
        notes.close()
        steps = read_steps(RunDir(tmp_path).events_file(0))
        assert len(steps) == 3
        for step in steps:
            assert 0 < step["exposed_s"] <= step["comm_s"] <= step["step_s"]
        assert net.module.bias.grad.eq(8).all()
    finally:
        dist.destroy_process_group()
