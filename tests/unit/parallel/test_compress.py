"""The arithmetic and the labels of modes that send less, without other ranks."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from paceline.config import Parallel, build_spec
from paceline.parallel.compress import DIFFERENCES, OUTER_LR, OUTER_MOMENTUM, LocalSGD, describe_difference
from paceline.runlog.summary import compute_summary, print_summary
from paceline.runlog.timers import CollectiveTimer

MODES = {"bf16", "fp16", "powersgd", "local_sgd", "diloco"}


def test_the_outer_step_is_that_of_torchs_nesterov():
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    joiner = LocalSGD(net, every=2, timer=CollectiveTimer(), outer=True)
    twin = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    reference = torch.optim.SGD(twin, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    for step in range(1, 9):
        for p in net.parameters():
            p.data.add_(torch.randn(p.shape))
        if step % 2 == 0:
            for ours, theirs in zip(net.parameters(), twin, strict=True):
                theirs.grad = theirs.detach() - ours.detach()
            reference.step()
        joiner.average_models(step, now=False)
        if step % 2 == 0:
            for ours, theirs in zip(net.parameters(), twin, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-6)


def test_every_mode_that_changes_the_answer_says_so():
    assert DIFFERENCES["modes"].keys() == MODES
    assert describe_difference(Parallel(ranks=2)) is None
    assert describe_difference(Parallel(ranks=1, reduce="powersgd")) is None, "nobody to send to"
    assert describe_difference(Parallel(ranks=1, reduce="diloco")), "the outer optimiser works on 1 rank, too"
    for mode in MODES:
        label = describe_difference(Parallel(ranks=2, reduce=mode, local_steps=16))
        assert label["on_test_task"]["loss"] == DIFFERENCES["modes"][mode]["loss"]
        assert label["local_steps"] == (16 if mode in ("local_sgd", "diloco") else None)
        summary = replace(compute_summary(build_spec({"name": "run"}), "", [], "finished"), differs_from=label)
        console = Console(file=io.StringIO(), width=100)
        print_summary(summary, console)
        said = " ".join(console.file.getvalue().split())
        assert f"reduce={mode}: not the answer of plain DDP" in said
        assert f"{DIFFERENCES['modes'][mode]['loss']:+.2%}" in said


def test_the_speed_of_ranks_that_train_apart_counts_what_joining_costs():
    """A median over single steps would say 1000 samples per second."""
    spec = build_spec({"parallel": {"ranks": 2, "reduce": "local_sgd", "local_steps": 4}})
    steps = [
        {"step": i, "samples": 100 * i, "batch": 100, "loss": 1.0, "data_s": 0.0, "compute_s": 0.1}
        | ({"step_s": 0.5, "comm_s": 0.4, "exposed_s": 0.4} if i % 4 == 0 else {"step_s": 0.1, "comm_s": 0.0})
        for i in range(1, 41)
    ]
    summary = compute_summary(spec, "", steps, "finished")
    assert summary.samples_per_s == pytest.approx(500)
    assert summary.median["step_s"] == pytest.approx(0.2)
    assert summary.median["comm_s"] == pytest.approx(0.1)
