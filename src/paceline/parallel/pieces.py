"""What one rank updates of each parameter.

The optimiser never meets a distributed tensor. It gets plain tensors that share memory with what this rank holds of
each parameter, so one update rule serves every layout, at full speed. What a piece is of the whole is remembered
beside it, for gradient norms and for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Piece:
    name: str
    param: nn.Parameter
    data: Tensor
    """Plain, and in the memory of the parameter."""
    copies: int
    """Ranks that hold the very same numbers, this one included."""
    cut: Callable[[Tensor], Tensor]
    """This rank's part of a tensor like the parameter (its gradient), as a plain tensor."""
    whole: Callable[[Tensor], Tensor]
    """A tensor like `data` as a checkpoint sees it: with its place in the whole."""


class Pieces(Sequence[Piece]):
    """All pieces of a rank, in the order of the model."""

    def __init__(
        self, pieces: Sequence[Piece], group: Any = None, after_update: Callable[[], None] = lambda: None
    ) -> None:
        self._pieces = list(pieces)
        self._copies = {id(piece.data): piece.copies for piece in pieces}
        self._group = group
        """Ranks that together hold the same parameters as this one; None where each holds all of them."""
        self.after_update = after_update

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: Any) -> Any:
        return self._pieces[index]

    def gradients(self) -> None:
        """Put this rank's part of each gradient where the optimiser looks for it."""
        for piece in self._pieces:
            if piece.data is not piece.param and piece.param.grad is not None:
                piece.data.grad = piece.cut(piece.param.grad)

    def clear(self) -> None:
        for piece in self._pieces:
            piece.param.grad = piece.data.grad = None

    def square(self) -> Tensor:
        """This rank's share of the squared gradient norm, for a sum over all ranks.

        A core adds many numbers up one after the other, and in fp32 that order would show in the fifth digit.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for piece in self._pieces:
            if piece.data.grad is not None:
                by_copies.setdefault(piece.copies, []).append(piece.data.grad)
        squares = [torch.zeros((), dtype=torch.float64, device=self._pieces[0].data.device)]
        for copies, grads in by_copies.items():
            kind = None if grads[0].is_cuda else torch.float64
            squares.append(torch.stack(torch._foreach_norm(grads, 2, dtype=kind)).double().square().sum() / copies)
        return torch.stack(squares).sum()

    def norms(self, of: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The norm of each whole tensor, of which this rank has the part that belongs to the piece in `of`."""
        found = list(torch._foreach_norm(list(tensors)))
        if self._group is None:
            return found
        copies = torch.tensor([self._copies[id(data)] for data in of], dtype=torch.float64, device=found[0].device)
        squares = torch.stack(found).double().square() / copies
        dist.all_reduce(squares, group=self._group)
        return list(squares.sqrt().to(found[0].dtype).unbind())


def pieces_of(parts: Sequence[nn.Module], ranks: int, group: Any = None) -> Pieces:
    """The pieces of parameters as they are: whole tensors, or local parts of DTensors.

    `ranks` of them hold these parameters together, and form `group` where there are others beside them.
    """
    found = [
        _local(name, p, ranks) if isinstance(p, DTensor) else Piece(name, p, p, ranks, lambda t: t, lambda t: t)
        for part in parts
        for name, p in part.named_parameters()
        if p.requires_grad
    ]
    divided = any(piece.copies != ranks for piece in found)
    return Pieces(found, group if divided else None)


def _local(name: str, param: Any, ranks: int) -> Piece:
    mesh, placements = param.device_mesh, param.placements
    parts = 1
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            parts *= mesh.size(axis)

    def cut(like: Any) -> Tensor:
        assert isinstance(like, DTensor), f"the gradient of {name} is a {type(like).__name__}"
        if like.placements != placements:  # a sum that is still to be taken
            like = like.redistribute(placements=placements)
        return like.to_local()

    def whole(local: Tensor) -> Tensor:
        if local.shape != data.shape:  # a number that is the same for all of it
            return local
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())

    data = param.detach().to_local()
    return Piece(name, param, data, ranks // parts, cut, whole)
