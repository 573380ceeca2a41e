"""What the ranks of `test_compress.py` do."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from paceline.launch.environment import detect_rank
from paceline.launch.process_group import join_ranks
from paceline.parallel import ddp
from paceline.parallel.compress import HalfPrecisionReduction, LocalSGD, PowerSGD
from paceline.runlog.timers import CollectiveTimer

SHAPES = {"wide": (24, 60), "tall": (90, 20), "bias": (17,), "narrow": (3, 5)}


class Counted(CollectiveTimer):
    """How many collectives were reported, and how."""

    def take(self):
        found = len(self._buckets), len(self._blocking)
        super().take()
        return found


def bucket_of(grads):
    """Gradients as torch's hook sees them."""
    flat = torch.cat([g.reshape(-1) for g in grads])
    parts = flat.split([g.numel() for g in grads])
    views = [part.view_as(g) for part, g in zip(parts, grads, strict=True)]
    return SimpleNamespace(buffer=lambda: flat, gradients=lambda: views, index=lambda: 0, is_last=lambda: True)


def on_ranks():
    """Check all of it on this rank, together with the others."""
    place = detect_rank(os.environ)
    with join_ranks(place, "cpu", 1, 120):
        for check in (follows_torch, keeps_and_settles, rounds, joins):
            check(place.rank, place.world)


def model():
    torch.manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(shape).double()) for name, shape in SHAPES.items()})


def draw(rank, step):
    """A gradient of each parameter."""
    torch.manual_seed(1000 * step + rank)
    return {name: torch.randn(shape).double() for name, shape in SHAPES.items()}


def total(grads):
    grads = {name: g.clone() for name, g in grads.items()}
    for g in grads.values():
        dist.all_reduce(g)
    return grads


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


def follows_torch(rank, ranks):
    ours, theirs = PowerSGD(model(), Counted()), PowerSGDState(None, 4, start_powerSGD_iter=2, min_compression_rate=2)
    assert sorted(ours.qt) == ["tall", "wide"], "vectors and small matrices are sent as they are"
    names = list(SHAPES)
    theirs.iter = 2
    large = [name for name in names if name in ours.qt]
    theirs.q_memory_dict[0] = torch.cat([ours.qt[name].T.reshape(-1) for name in large])
    theirs.p_memory_dict[0] = torch.empty(sum(4 * SHAPES[name][0] for name in large)).double()
    for step in range(4):
        grads = draw(rank, step)
        want = total(grads)
        bucket = bucket_of([grads[name] * ranks for name in names])  # theirs is a mean
        powerSGD_hook(theirs, bucket).wait()
        ours.reduce(grads)
        assert apart(dict(zip(names, bucket.gradients(), strict=True)), grads) < 1e-10
        assert apart(grads, want) > 0.1, "random matrices are not of low rank"


def keeps_and_settles(rank, ranks):
    ours, twin = PowerSGD(model(), Counted()), PowerSGD(model(), Counted())
    for step in range(4):
        ours.reduce(draw(rank, step))
    assert all(k.norm() > 0 for k in ours.kept.values()), "the error is fed back"
    for name in ours.qt:
        twin.qt[name].copy_(ours.qt[name])
        twin.kept[name].copy_(ours.kept[name])
    twin.average_state([])
    assert all(same_on_all(k) for k in twin.kept.values())
    one, other = draw(rank, 9), draw(rank, 9)
    ours.reduce(one)
    twin.reduce(other)
    assert apart(one, other) < 1e-10, "a checkpoint changes nothing but rounding"

    before = {name: k.clone() for name, k in ours.kept.items()}
    poisoned = draw(rank, 10)
    if rank == 0:
        poisoned["tall"][3, 3] = float("inf")
    ours.reduce(poisoned)
    assert not all(bool(torch.isfinite(g).all()) for g in poisoned.values()), "all know of an overflow of one"
    assert all(torch.equal(before[name], k) for name, k in ours.kept.items()), "and it is not fed back"


def rounds(rank, ranks):
    """Through DistributedDataParallel, near the exact sum, which fp16 could not hold."""
    for dtype, near in ((torch.bfloat16, 2**-6), (torch.float16, 2**-9)):
        timer = Counted()
        torch.manual_seed(0)
        net = nn.Linear(40, 30).double()
        weight = torch.rand(30, 40).double() * 1e3
        wrapped = ddp.wrap_ddp(net, torch.device("cpu"), 25, timer, HalfPrecisionReduction(dtype, timer).hook)
        scale = 60.0  # a sum over ranks beyond what fp16 can hold, each term within
        x = torch.eye(40).double() * scale * (rank + 1) / ranks
        (wrapped(x) * weight.T).sum().backward()
        want = weight * sum(scale * (r + 1) / ranks for r in range(ranks))
        assert want.abs().max() > 70_000
        assert float(((net.weight.grad - want).abs() / want.abs().max()).max()) < near
        assert timer.take() == (1, 0)


def joins(rank, ranks):
    """The mean for local SGD, the same bits on all ranks, one collective each."""
    for outer in (False, True):
        timer, net = Counted(), model()
        joiner = LocalSGD(net, 3, timer, outer)
        began = {name: p.detach().clone() for name, p in net.items()}
        for step in range(1, 4):
            for name, g in draw(rank, step).items():
                net[name].data.sub_(g)
            alone = {name: p.detach().clone() for name, p in net.items()}
            joiner.average_models(step, now=False)
        joiner.average_models(3, now=True)  # again: nothing happens
        assert timer.take() == (0, 1)
        assert all(same_on_all(p.detach()) for p in net.values())
        mean = {name: value / ranks for name, value in total(alone).items()}
        want = {n: began[n] - 0.7 * 1.9 * (began[n] - mean[n]) for n in began} if outer else mean
        assert apart({name: p.detach() for name, p in net.items()}, want) < 1e-12
    moments = [torch.full((3,), float(rank)), torch.tensor(float(rank)), torch.full((2,), float(rank)).double()]
    joiner.average_state(moments)
    assert all(bool((m == (ranks - 1) / 2).all()) for m in moments)


def same_on_all(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return all(torch.equal(tensor, other) for other in everyone)
