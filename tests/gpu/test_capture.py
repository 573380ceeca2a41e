"""On a CUDA device: the recorded step gives the same answer as the plain one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import results
from paceline import train
from paceline.parallel.ddp import wrap_ddp
from paceline.runlog.timers import CudaCollectiveTimer
from paceline.trainer.optim.optimizers import Adam, AdamW, can_spread

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def losses(spec, out):
    result = train(spec, out, show=False)
    return results.losses(result), result


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


@pytest.mark.parametrize(
    ("precision", "changes", "near"),
    [("bf16", {"train.steps": 30, "data.limit": 0}, 0.03), ("fp32", {"train.steps": 20}, 1e-4)],
)
def test_the_device_follows_fp32_on_the_cpu(small, tmp_path, precision, changes, near):
    spec = small.replace(changes)
    reference, _ = losses(spec.replace({"parallel.device": "cpu"}), tmp_path)
    device, _ = losses(spec.replace({"train.precision": precision}), tmp_path)
    assert max(abs(a - b) / a for a, b in zip(reference, device, strict=True)) < near


def test_flights_on_the_device_are_timed_in_its_own_streams(tmp_path):
    """One rank joined to itself over NCCL: buckets are in flight while the backward pass goes on."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        timer = CudaCollectiveTimer()
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).to(device)
        net = wrap_ddp(model, device, 25.0, timer)
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


@pytest.mark.parametrize("rule", ["adam", "adamw"])
def test_an_update_spread_over_the_device_is_that_of_whole_tensors(rule):
    """Pieces that do not come out even, a tensor that cannot be cut, two groups, and a step that is passed over."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    kind = {"adam": Adam, "adamw": AdamW}[rule]

    def optimizer() -> Any:
        torch.manual_seed(1)
        shapes = [(1000, 300), (3, 5, 7, 9), (17,)]
        params = [torch.randn(shape, device=device) for shape in shapes]
        params[1] = params[1].contiguous(memory_format=torch.channels_last)
        groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
        made = kind(groups, lr=torch.tensor(1e-2, device=device), fused=True, capturable=True)
        for group in made.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        made.grad_scale, made.found_inf = torch.full((), 2.0, device=device), torch.zeros((), device=device)
        made.step()
        return made

    whole, spread = optimizer(), optimizer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert can_spread(spread)
        spread.step()
    assert not can_spread(whole)
    pairs = [
        (a, b)
        for ours, theirs in zip(whole.param_groups, spread.param_groups, strict=True)
        for a, b in zip(ours["params"], theirs["params"], strict=True)
    ]
    for step in range(6):
        for a, b in pairs:
            a.grad.normal_()
            b.grad.copy_(a.grad)
        for one in (whole, spread):
            one.found_inf.fill_(float(step == 3))
        whole.step()
        graph.replay()
    for a, b in pairs:
        assert torch.equal(a, b)
        assert all(torch.equal(whole.state[a][key], spread.state[b][key]) for key in whole.state[a])
        assert whole.state[a]["step"].item() == 6
