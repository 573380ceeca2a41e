"""Scripts as people have them, each in processes of its own: python outside_scenarios.py FOLDER

All of them are forks of this process, which imports once what they need and has no hooks; a fork sets them, unless its
name ends in "alone", as `paceline measure` would have it.
"""

import atexit
import itertools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import accelerate  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from paceline.launch.environment import LOCALHOST
from paceline.launch.local import reserve_port
from paceline.measurement.scripts.command import REQUEST_VARIABLE, RecordRequest
from paceline.measurement.scripts.hooks import install_hooks

STEPS = 6
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "moving"
X = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


def backward(net: nn.Module, x: torch.Tensor = X) -> None:
    net(x).square().mean().backward()


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int | None = None, reduce: bool = False
) -> None:
    """Make steps without end, or so many; `reduce`: sum gradients as Horovod does, with handles now and waits later."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in itertools.count() if steps is None else range(steps):
        optimizer.zero_grad()
        backward(net)
        for work in [dist.all_reduce(p.grad, async_op=True) for p in net.parameters() if reduce]:
            work.wait()
        optimizer.step()


def loader() -> Iterator[list[torch.Tensor]]:
    while True:
        yield from DataLoader(TensorDataset(X), batch_size=8)


def accumulating() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for number, (x,) in enumerate(loader()):
        backward(net, x)
        if number % 2:
            optimizer.step()


def two_optimizers() -> None:
    nets = [model(), model()]
    optimizers = [torch.optim.Adam(nets[0].parameters()), torch.optim.SGD(nets[1].parameters())]
    for _ in range(2 * STEPS):
        for net, optimizer in zip(nets, optimizers, strict=True):
            backward(net)
            optimizer.step()


class Outer(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def wrapped_optimizer() -> None:
    net = model()
    train(net, Outer(torch.optim.SGD(net.parameters())))


def no_step() -> None:
    backward(model())


def short() -> None:
    train(model(), steps=3)


def failing() -> None:
    short()
    raise ValueError("labels go from 0 to 9, and 11 was found")


def three_ranks() -> None:
    dist.init_process_group("gloo", world_size=3)


def ddp() -> None:
    """Accumulates gradients and writes its weights after each step, with which it may end."""
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, (x,) in zip(range(STEPS + 1), loader(), strict=False):
        optimizer.zero_grad()
        with net.no_sync():
            backward(net, x)
        backward(net, x + dist.get_rank())
        torch.save({name: w.detach() for name, w in net.named_parameters()}, f"weights{dist.get_rank()}-{number}.pt")
        optimizer.step()


def by_themselves() -> None:
    dist.init_process_group("gloo")
    wrapped_optimizer()


def fsdp() -> None:
    dist.init_process_group("gloo")
    net = model()
    fully_shard(net)
    train(net)


def asynchronous() -> None:
    dist.init_process_group("gloo")
    train(model(), reduce=True)


def example(name: str) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}_before.py"), run_name="__main__")


class Scenario(NamedTuple):
    script: Callable[[], None]
    ranks: int = 1


ALONE = (accumulating, two_optimizers, wrapped_optimizer, no_step, short, failing)
ON_TWO_RANKS = (three_ranks, ddp, by_themselves, fsdp, asynchronous)
SCENARIOS = {
    **{script.__name__: Scenario(script) for script in ALONE},
    **{script.__name__: Scenario(script, ranks=2) for script in ON_TWO_RANKS},
    "each_by_itself": Scenario(wrapped_optimizer, ranks=2),
    "accelerate": Scenario(lambda: example("accelerate")),
    "lightning": Scenario(lambda: example("lightning")),
}
SCENARIOS |= {f"{name}_alone": SCENARIOS[name] for name in ("ddp", "accelerate", "lightning")}


def be_a_rank(name: str, scenario: Scenario, rank: int, port: int, folder: Path) -> int:
    os.chdir(folder)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": scenario.ranks, "LOCAL_WORLD_SIZE": scenario.ranks}
    place |= {"MASTER_ADDR": LOCALHOST, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()} if scenario.ranks > 1 else {})
    request = RecordRequest(str(folder), STEPS, scenario.ranks)
    if not name.endswith("alone"):
        os.environ[REQUEST_VARIABLE] = request.environ({})[REQUEST_VARIABLE]
        install_hooks()
    try:
        scenario.script()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(folder: Path) -> None:
    started: dict[int, str] = {}
    with ExitStack() as ports:
        for name, scenario in sorted(SCENARIOS.items(), key=lambda item: item[0].startswith("lightning")):
            if name.startswith("lightning") and "lightning" not in sys.modules:
                import lightning  # noqa: F401  (for seconds, in which the others are at work)
            (folder / name).mkdir()
            port = ports.enter_context(reserve_port())
            for rank in range(scenario.ranks):
                if (pid := os.fork()) == 0:
                    code = be_a_rank(name, scenario, rank, port, folder / name)
                    sys.stdout.flush()
                    atexit._run_exitfuncs()
                    os._exit(code)
                started[pid] = name
        for _ in range(len(started)):
            pid, status = os.wait()
            with open(folder / started[pid] / "codes", "a") as codes:
                codes.write(f"{os.waitstatus_to_exitcode(status)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
