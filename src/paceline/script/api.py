"""The run that a script gets from `with paceline.run(…) as run`, and checks of what it passes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from numbers import Real
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from paceline.config import SCRIPT_OBJECT, RunSpec, Train
from paceline.errors import UserError
from paceline.script.workload import MISUSE
from paceline.trainer.checkpoint.reader import Stateful

Schedule = Callable[[int, int], float]
"""(samples seen, samples of the whole run) -> factor of the learning rate."""
Sums = Callable[..., Mapping[str, Tensor | float]]
Model = TypeVar("Model", bound=nn.Module)


class ScriptRun(ABC):
    """One rank's view of its run. The defaults are those of one process that trains nothing."""

    spec: RunSpec
    device: torch.device
    """Of this rank; batches and the model are moved to it."""
    rank: int
    ranks: int

    @property
    def main(self) -> bool:
        """Return whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of the whole run so far, each of one global batch."""

    def prepare(
        self, model: Model, optimizer: Optimizer | None = None, *others: Any, schedule: Schedule | None = None
    ) -> tuple[Model, Optimizer]:
        """Return the model, distributed as the run file says, and its optimiser, by default that of the run file.

        Learning rates follow `train.schedule`, or `schedule(samples seen, samples of the run)` as a factor.
        """
        check_pair(False, model, optimizer, others)
        return model, optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)

    @abstractmethod
    def batches(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None, workers: int | None = None
    ) -> Iterator[Any]:
        """Yield this rank's part of each global batch, pass by pass, to the end of the run or of the epoch.

        `dataset` is what `Workload.data` may return; `workers` processes load it, unless `data.workers` is set.
        """

    @abstractmethod
    def step(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """Backpropagate the sum of a batch's `count` losses; the last pass of a global batch updates the model."""

    def epochs(self) -> Iterator[int]:
        """Yield the remaining epochs, counted from 0; the first may be partly done."""
        yield 0

    def evaluate(self, dataset: Any, sums: Sums, best: str = "") -> dict[str, Any]:
        """Return and record metrics over a whole data set, the same on any number of ranks.

        `sums` gets batches and returns sums over their samples with a "count", by which they are divided. `best` is the
        metric that ranks checkpoints, with a minus if lower is better: `-loss`.
        """
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Context for your own evaluation: no gradients, the run's precision, averaged weights if it keeps them."""
        return nullcontext()

    @abstractmethod
    def keep(self, **things: Stateful) -> None:
        """Save these objects, with `state_dict` and `load_state_dict`, in checkpoints; call it before `batches`."""


STEP_EXAMPLE = 'run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))'
MEAN_REDUCTION = 1
TRANSPARENT_NODES = ("ToCopyBackward", "CloneBackward", "ViewBackward", "SqueezeBackward", "AliasBackward", "_DDPSink")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state", "weights", "lr", "weight_decay", "beta1", "beta2", "momentum")
"""Keys of `train` without effect on an optimiser of the script."""


def misuse_error(call: str, problem: str, **values: object) -> UserError:
    reason = MISUSE[call][problem].format(example=STEP_EXAMPLE, **values)
    return UserError(f"{call}: {reason}", code="invalid-request", key=call)


def check_loss(total: Any, count: Any) -> None:
    """Reject anything but a sum of losses that depend on the model, and their number."""
    if not isinstance(total, Tensor):
        wrong = f"the loss is {type(total).__name__}, not a tensor"
    elif total.ndim:
        wrong = f"the loss has the shape {list(total.shape)}"
    elif not total.requires_grad:
        wrong = "the loss does not depend on the model's parameters"
    elif isinstance(count, bool) or not (isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        wrong = f"the count is {type(count).__name__}, not a number"
    else:
        return
    raise misuse_error("run.step", "wrong", wrong=wrong)


def reject_mean_loss(total: Tensor, samples: int) -> None:
    """Reject a mean over several samples, by the last operation in torch's graph."""
    node: Any = total.grad_fn
    while node is not None and node.name().startswith(TRANSPARENT_NODES) and node.next_functions:
        node = node.next_functions[0][0]
    if node is None or samples < 2:
        return
    if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == MEAN_REDUCTION:
        raise misuse_error("run.step", "mean", samples=samples, node=node.name())


def check_dataset(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise misuse_error("run.batches", "loader")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") or hasattr(dataset, "to_numpy")):
        raise misuse_error("run.batches", "stream", kind=type(dataset).__name__)


class ModelView:
    """A distributed model as the script sees it: with its own class, methods and names.

    A call in training goes to the wrapper, any other to the model itself: an evaluation never waits for other ranks.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net: nn.Module | None = net if isinstance(net, DistributedDataParallel) else None
        self.model = net if self.net is None else self._build_view(cast(nn.Module, net.module))
        self.called = False
        """Since a pass started; gradients of other ranks are summed only in a call."""

    def _build_view(self, inner: nn.Module) -> nn.Module:
        def call(view: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.called = True
            training = view.training and torch.is_grad_enabled()
            return (self.net if training and self.net is not None else inner)(*args, **kwargs)

        def deep_copy(view: nn.Module, memo: dict[int, Any]) -> nn.Module:
            return deepcopy(inner, memo)

        def reduce(view: nn.Module, protocol: Any) -> Any:  # a pickle that loads without this module
            return copy, (inner,)

        own = {"__call__": call, "__deepcopy__": deep_copy, "__reduce_ex__": reduce}
        kind = type(type(inner).__name__, (type(inner),), {**own, "__module__": type(inner).__module__})
        view = cast(nn.Module, object.__new__(kind))
        view.__dict__ = inner.__dict__
        return view

    def check_called(self) -> None:
        if self.net is not None and not self.called:
            raise misuse_error("model", "not called")


def check_pair(prepared: bool, model: Any, optimizer: Any, others: tuple[Any, ...]) -> None:
    if prepared or others or isinstance(optimizer, list | tuple | dict):
        raise misuse_error("run.prepare", "several")
    if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
        raise misuse_error("run.prepare", "no module", kind=type(model).__name__)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise misuse_error("run.prepare", "no optimizer", kind=type(optimizer).__name__)


def apply_optimizer_rate(spec: RunSpec, optimizer: Optimizer) -> RunSpec:
    """Return the spec with the learning rate of a script's optimiser; reject keys that contradict it."""
    kind = type(optimizer).__name__
    unused = [key for key in OPTIMIZER_KEYS if getattr(spec.train, key) != getattr(Train(), key)]
    unused += ["groups"] * any(group.lr or group.weight_decay is not None for group in spec.train.groups.values())
    if unused:
        key = f"train.{unused[0]}"
        message = f"{key} ({spec.origin(key)}) has no effect: run.prepare got the script's own {kind}"
        raise UserError(f"{message}; leave the key out, or call  run.prepare(model)", code="conflict", key=key)
    reject_scheduler(optimizer)
    rate = float(optimizer.param_groups[0]["lr"])
    if optimizer.state:
        raise misuse_error("run.prepare", "used", kind=kind)
    if not rate > 0:
        raise misuse_error("run.prepare", "rate", kind=kind, rate=rate)
    return spec.replace({"train.lr": rate}, SCRIPT_OBJECT)


def reject_scheduler(optimizer: Optimizer) -> None:
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise misuse_error("run.prepare", "scheduler", kind=type(optimizer).__name__)


def guard_optimizer(optimizer: Optimizer, updating: Callable[[], bool]) -> None:
    """Reject `optimizer.step()` and `zero_grad()` in the script: the run calls both."""
    for name in ("step", "zero_grad"):
        own = getattr(optimizer, name)

        def call(_: Optimizer, *args: Any, name: str = name, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            if not updating():
                raise misuse_error(f"optimizer.{name}", "own call")
            return own(*args, **kwargs)

        setattr(optimizer, name, MethodType(call, optimizer))  # a method, as torch's schedulers expect
