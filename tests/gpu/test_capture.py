"""On a CUDA device: the recorded step gives the same answer as the plain one."""

import pytest
import torch

from paceline import train
from paceline.record.events import read_steps
from paceline.record.run_dir import RunDir

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def losses(spec, out):
    result = train(spec, out, show=False)
    return [step["loss"] for step in read_steps(RunDir(result.path).events_file(0))], result


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_recorded_and_plain_steps_agree(small, tmp_path, precision):
    spec = small.replace({"train.precision": precision, "model.dropout": 0.1, "train.steps": 40, "data.limit": 0})
    plain, _ = losses(spec.replace({"train.compile": "off"}), tmp_path)
    recorded, result = losses(spec, tmp_path)
    assert max(abs(a - b) / a for a, b in zip(plain, recorded, strict=True)) < 0.03
    assert result.summary.trained.skipped_steps == 0


def test_averages_groups_and_cut_gradients_are_recorded_too(small, tmp_path):
    options = {"train.ema": 0.9, "train.clip_value": 0.01, "train.groups": {"head.*": {"lr": 1e-3}}}
    spec = small.replace({"train.precision": "bf16", "train.steps": 40, "model.class_weights": "balanced", **options})
    plain, eager = losses(spec.replace({"train.compile": "off"}), tmp_path)
    recorded, result = losses(spec, tmp_path)
    assert max(abs(a - b) / a for a, b in zip(plain, recorded, strict=True)) < 0.03
    assert abs(result.metrics["loss"] - eager.metrics["loss"]) < 0.03 * eager.metrics["loss"]


def test_bf16_on_the_device_follows_fp32_on_the_cpu(small, tmp_path):
    spec = small.replace({"train.steps": 30, "data.limit": 0})
    reference, _ = losses(spec.replace({"parallel.device": "cpu"}), tmp_path)
    device, _ = losses(spec.replace({"train.precision": "bf16"}), tmp_path)
    assert max(abs(a - b) / a for a, b in zip(reference, device, strict=True)) < 0.03


def test_fp32_on_the_device_equals_fp32_on_the_cpu(small, tmp_path):
    spec = small.replace({"train.steps": 20})
    reference, _ = losses(spec.replace({"parallel.device": "cpu"}), tmp_path)
    device, _ = losses(spec, tmp_path)
    assert max(abs(a - b) / a for a, b in zip(reference, device, strict=True)) < 1e-4


def test_flights_on_the_device_are_timed_in_its_own_streams(tmp_path):
    """One rank joined to itself over NCCL: buckets are in flight while the backward pass goes on."""
    import torch.distributed as dist

    from paceline.parallel.ddp import wrap
    from paceline.record.timers import CudaCollectiveTimer

    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        timer = CudaCollectiveTimer()
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).to(device)
        net = wrap(model, device, 25.0, timer)
        x = torch.randn(4096, 4096, device=device)
        for _ in range(3):
            net(x).square().mean().backward()
            torch.cuda.synchronize()
            comm, exposed = timer.take()()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        net(x).square().mean().backward()
        end.record()
        torch.cuda.synchronize()
        comm, exposed = timer.take()()
        print(f"step {begin.elapsed_time(end):.2f} ms, comm {comm * 1e3:.3f} ms, exposed {exposed * 1e3:.3f} ms")
        assert 0 < exposed <= comm < begin.elapsed_time(end) / 1e3
    finally:
        dist.destroy_process_group()
