"""What one rank updates of each parameter.

The optimiser never meets a distributed tensor. It gets plain tensors that share memory with what this rank holds of
each parameter, so one update rule serves every layout, at full speed. What a part is of the whole is remembered
beside it, for gradient norms and for checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, asked without importing them: that takes seconds, and a rank alone has none."""
    return hasattr(tensor, "device_mesh")


@dataclass(frozen=True)
class LocalParameter:
    name: str
    param: nn.Parameter
    data: Tensor
    """Plain, and in the memory of the parameter."""
    copies: int
    """Ranks that hold the very same numbers, this one included."""
    cut: Callable[[Tensor], Tensor] = lambda like: like
    """This rank's part of a tensor like the parameter (its gradient), as a plain tensor."""
    whole: Callable[[Tensor], Tensor] = lambda local: local
    """A tensor like `data` as a checkpoint sees it: with its place in the whole."""


class LocalParameters(Sequence[LocalParameter]):
    """All that a rank updates, in the order of the model."""

    def __init__(
        self, parameters: Sequence[LocalParameter], group: Any = None, after_update: Callable[[], None] = lambda: None
    ) -> None:
        self._all = list(parameters)
        self._copies = {id(part.data): part.copies for part in parameters}
        self._group = group
        """Ranks that together hold the same parameters as this one; None where each holds all of them."""
        self.after_update = after_update

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    @property
    def divided(self) -> bool:
        """Whether ranks hold parts, so that none has a whole parameter to itself."""
        return self._group is not None

    def gradients(self) -> None:
        """Put this rank's part of each gradient where the optimiser looks for it."""
        for part in self._all:
            if part.data is not part.param and part.param.grad is not None:
                part.data.grad = part.cut(part.param.grad)

    def complete_gradients(self) -> None:
        """A parameter that took no part in the loss has a gradient of 0."""
        for part in self._all:
            if part.data.grad is None:
                part.data.grad = torch.zeros_like(part.data)

    def clear(self) -> None:
        for part in self._all:
            part.param.grad = part.data.grad = None

    def square(self) -> Tensor:
        """This rank's share of the squared gradient norm, for a sum over all ranks.

        A core adds many numbers up one after the other, and in fp32 that order would show in the fifth digit.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for part in self._all:
            if part.data.grad is not None:
                by_copies.setdefault(part.copies, []).append(part.data.grad)
        squares = []
        for copies, grads in by_copies.items():
            kind = None if grads[0].is_cuda else torch.float64
            norms = torch.stack(torch._foreach_norm(grads, 2, dtype=kind))
            square = torch.linalg.vector_norm(norms, dtype=torch.float64).square()
            squares.append(square if copies == 1 else square / copies)
        if len(squares) == 1:
            return squares[0]
        return sum(squares, torch.zeros((), dtype=torch.float64, device=self._all[0].data.device))

    def norms(self, of: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The norm of each whole tensor, of which this rank has the part that belongs to the part in `of`."""
        found = list(torch._foreach_norm(list(tensors)))
        if self._group is None:
            return found
        copies = torch.tensor([self._copies[id(data)] for data in of], dtype=torch.float64, device=found[0].device)
        squares = torch.stack(found).double().square() / copies
        dist.all_reduce(squares, group=self._group)
        return list(squares.sqrt().to(found[0].dtype).unbind())


def local_parameters_of(modules: Sequence[nn.Module], ranks: int, group: Any = None) -> LocalParameters:
    """Of parameters as they are: whole tensors, or local parts of DTensors.

    `ranks` of them hold these parameters together, and form `group` where there are others beside them.
    """
    found = [
        _shard(name, p, ranks) if is_sharded(p) else LocalParameter(name, p, p, ranks)
        for module in modules
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    divided = any(part.copies != ranks for part in found)
    return LocalParameters(found, group if divided else None)


def _shard(name: str, param: Any, ranks: int) -> LocalParameter:
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements
    parts = math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())

    def cut(like: Any) -> Tensor:
        assert is_sharded(like), f"the gradient of {name} is a {type(like).__name__}"
        if like.placements != placements:  # a sum that is still to be taken
            like = like.redistribute(placements=placements)
        return like.to_local()

    def whole(local: Tensor) -> Tensor:
        if local.shape != data.shape:  # a number that is the same for all of it
            return local
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())

    data = param.detach().to_local()
    return LocalParameter(name, param, data, ranks // parts, cut, whole)


def shared_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, int, int]]:
    """(name, index of a module, index of another that has the same parameter)"""
    owner: dict[int, int] = {}
    for index, module in enumerate(modules):
        for name, p in module.named_parameters():
            if owner.setdefault(id(p), index) != index:
                yield name, owner[id(p)], index
