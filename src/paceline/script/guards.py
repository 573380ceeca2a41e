"""Validate and wrap what a script passes to its run: losses, data sets, models and optimisers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from numbers import Real
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, Subset

from paceline.config import SCRIPT_OBJECT, RunSpec, Train
from paceline.errors import UserError

STEP_EXAMPLE = 'run.step(F.cross_entropy(model(x), y, reduction="sum"), len(y))'
MEAN_REDUCTION = 1
"""The number by which torch's losses remember that they are means."""
TRANSPARENT_NODES = ("ToCopyBackward", "CloneBackward", "ViewBackward", "SqueezeBackward", "AliasBackward", "_DDPSink")


def check_loss(total: Any, count: Any) -> None:
    """Refuse what is not the sum of losses that depend on the model, and their number."""
    wrong = ""
    if not isinstance(total, Tensor):
        wrong = f"the loss is {type(total).__name__}, not a tensor"
    elif total.ndim:
        wrong = f"the loss has the shape {list(total.shape)}"
    elif not total.requires_grad:
        wrong = "the loss does not depend on the model's parameters"
    elif isinstance(count, bool) or not (isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        shape = f" of shape {list(count.shape)}" if isinstance(count, Tensor) else ""
        wrong = f"the count is {type(count).__name__}{shape}, not a number"
    if wrong:
        raise UserError(
            f"run.step(loss_sum, count): {wrong}; give it a sum and how many losses are in it:  {STEP_EXAMPLE}"
        )


def reject_mean_loss(total: Tensor, samples: int) -> None:
    """A mean over several samples shows in what torch noted of its last operation."""
    node: Any = total.grad_fn
    while node is not None and node.name().startswith(TRANSPARENT_NODES) and node.next_functions:
        node = node.next_functions[0][0]
    if node is None or samples < 2:
        return
    if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == MEAN_REDUCTION:
        raise UserError(
            f"run.step got a mean over the {samples} samples of a pass ({node.name()}); a mean of means depends on how "
            f"the batch is divided, so give it the sum and the count:  {STEP_EXAMPLE}"
        )


def check_dataset(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise UserError(
            "run.batches got a DataLoader; give it the data set:  run.batches(loader.dataset)  since the run file says "
            "how large a global batch is, and its order must not depend on the number of ranks"
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") or hasattr(dataset, "to_numpy")):
        raise UserError(
            f"run.batches got a stream, {type(dataset).__name__}, whose samples have no numbers: no run could be "
            "resumed or spread over ranks with each of them seen once; give it  list(stream)  if that fits in memory, "
            "or a data set with __len__ and __getitem__"
        )


def take_share(dataset: Any, rank: int, ranks: int, together: bool) -> Any:
    """Every `ranks`-th sample. `together`: a forward pass is work for all ranks, so all must make as many."""
    if together and len(dataset) % ranks:
        raise UserError(
            f"run.share: {len(dataset)} samples on {ranks} ranks are not equal parts, and in this layout no rank can "
            "compute without the others; use  run.evaluate(dataset, sums)"
        )
    if isinstance(dataset, tuple):
        return tuple(column[rank::ranks] for column in dataset)
    return Subset(dataset, range(rank, len(dataset), ranks))


ModelT = TypeVar("Model", bound=nn.Module)
OPTIMIZER_KEYS = ("optimizer", "lr", "weight_decay", "beta1", "beta2", "momentum")
"""Keys of `train` that an optimiser of the script's own leaves without effect."""


class ModelView:
    """A model that ranks train together, as the script sees it: under its own class, methods and names.

    Called while training, it is the wrapper that is called. Elsewhere the model itself is, so that an evaluation never
    waits for other ranks.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net: nn.Module | None = net if isinstance(net, DistributedDataParallel) else None
        self.model = net if self.net is None else self._view(cast(nn.Module, net.module))
        self.called = False
        """Since a pass began; what is computed without a call, the other ranks know nothing of."""

    def _view(self, inner: nn.Module) -> nn.Module:
        """Another object with the state of the model."""

        def call(view: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.called = True
            trains = view.training and torch.is_grad_enabled()
            return (self.net if trains and self.net is not None else inner)(*args, **kwargs)

        def copied(view: nn.Module, memo: dict[int, Any]) -> nn.Module:
            return deepcopy(inner, memo)

        def written(view: nn.Module, protocol: Any) -> Any:  # by words that can be read without this module
            return copy, (inner,)

        own = {"__call__": call, "__deepcopy__": copied, "__reduce_ex__": written, "__module__": type(inner).__module__}
        kind = type(type(inner).__name__, (type(inner),), own)
        view = cast(nn.Module, object.__new__(kind))
        view.__dict__ = inner.__dict__
        return view

    def check_called(self) -> None:
        if self.net is not None and not self.called:
            raise UserError(
                "the loss of a batch was computed without a call of the model that run.prepare gave back: gradients of "
                "several ranks are summed where  model(x)  is called, not a layer or a method of it; put what is "
                "computed into its forward()"
            )


def check_pair(prepared: bool, model: Any, optimizer: Any, others: tuple[Any, ...]) -> None:
    """Refuse all but one model with one optimiser."""
    if prepared or others or isinstance(optimizer, list | tuple | dict):
        raise UserError(
            "run.prepare takes one model and one optimiser, once; put several models into one, with "
            "nn.ModuleDict({…}), and give one optimiser a group for each. Two losses in turn, as of a GAN, are not "
            "offered"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"run.prepare(model, optimizer): the model is {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "run.prepare: the model is wrapped in DistributedDataParallel already; leave that out, "
            "run.prepare does it as the run file says"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UserError(f"run.prepare(model, optimizer): {type(optimizer).__name__} is not a torch.optim.Optimizer")


def apply_optimizer_rate(spec: RunSpec, optimizer: Optimizer) -> RunSpec:
    """The spec with the learning rate of a script's optimiser; what contradicts it is refused."""
    kind = type(optimizer).__name__
    for key in OPTIMIZER_KEYS:
        if (value := getattr(spec.train, key)) != getattr(Train(), key):
            raise UserError(
                f"train.{key}={value} ({spec.origin(f'train.{key}')}) has no effect: run.prepare got the script's own "
                f"{kind}; leave the key out, or call  run.prepare(model)  for the optimiser of the run file"
            )
    if changed := [name for name, group in spec.train.groups.items() if group.lr or group.weight_decay is not None]:
        raise UserError(
            f"train.groups: {changed[0]!r} has no effect: the script gives run.prepare its own {kind}; "
            f"say it as a group of the {kind}"
        )
    reject_scheduler(optimizer)
    if optimizer.state:
        raise UserError(f"run.prepare: the {kind} has made steps already; prepare it before its first")
    rate = float(optimizer.param_groups[0]["lr"])
    if not rate > 0:
        raise UserError(f"run.prepare: the learning rate of the {kind} is {rate:g}; it must be above 0")
    return spec.replace({"train.lr": rate}, SCRIPT_OBJECT)


def reject_scheduler(optimizer: Optimizer) -> None:
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UserError(
            f"the {type(optimizer).__name__} has a learning-rate scheduler of torch, and the run file has a schedule "
            "too; leave yours out and say train.schedule, or give a factor:  run.prepare(model, optimizer, schedule="
            "lambda seen, total: 1 - seen / total)"
        )


def guard_optimizer(optimizer: Optimizer, updating: Callable[[], bool]) -> None:
    """Refuse `optimizer.step()` and `zero_grad()` of the script: the run does both, once for each global batch."""
    for name in ("step", "zero_grad"):
        own = getattr(optimizer, name)

        def call(_: Optimizer, *args: Any, name: str = name, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
            if not updating():
                raise UserError(
                    f"optimizer.{name}() was called by the script; run.step does that, with the gradients of all "
                    "ranks and passes; delete the line"
                )
            return own(*args, **kwargs)

        setattr(optimizer, name, MethodType(call, optimizer))  # as torch's schedulers expect it
