"""A model and an optimiser as a script gets them back from `run.prepare`: usable as before, where that is safe."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.errors import UserError
from paceline.spec import RunSpec, Train

Model = TypeVar("Model", bound=nn.Module)
OF_THE_OPTIMIZER = ("optimizer", "lr", "weight_decay", "beta1", "beta2", "momentum")
"""Keys of `train` that an optimiser of the script's own leaves without effect."""


class Wrapping:
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

    def refuse_uncalled(self) -> None:
        if self.net is not None and not self.called:
            raise UserError(
                "the loss of a batch was computed without a call of the model that run.prepare gave back: gradients of "
                "several ranks are summed where  model(x)  is called, not a layer or a method of it; put what is "
                "computed into its forward()"
            )


def one_pair(prepared: bool, model: Any, optimizer: Any, others: tuple[Any, ...]) -> None:
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


def with_rates(spec: RunSpec, optimizer: Optimizer) -> RunSpec:
    """The spec with the learning rate of a script's optimiser; what contradicts it is refused."""
    kind = type(optimizer).__name__
    for key in OF_THE_OPTIMIZER:
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
    refuse_scheduler(optimizer)
    if optimizer.state:
        raise UserError(f"run.prepare: the {kind} has made steps already; prepare it before its first")
    rate = float(optimizer.param_groups[0]["lr"])
    if not rate > 0:
        raise UserError(f"run.prepare: the learning rate of the {kind} is {rate:g}; it must be above 0")
    return spec.replace({"train.lr": rate}, f"the script's {kind}")


def refuse_scheduler(optimizer: Optimizer) -> None:
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UserError(
            f"the {type(optimizer).__name__} has a learning-rate scheduler of torch, and the run file has a schedule "
            "too; leave yours out and say train.schedule, or give a factor:  run.prepare(model, optimizer, schedule="
            "lambda seen, total: 1 - seen / total)"
        )


def guarded(optimizer: Optimizer, updating: Callable[[], bool]) -> None:
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
