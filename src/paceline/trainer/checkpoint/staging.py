"""The tensors of a checkpoint on their way to files: which of them a rank writes, copied aside while training waits.

The copies are made into memory that is kept from one save to the next, and a tensor that every rank holds is copied and
written by one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.parameters import is_sharded


def flatten_state(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts of tensors as one dict with dotted names."""
    flat: dict[str, Tensor] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        inner = flatten_state(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
        for leaf, tensor in inner.items():
            assert isinstance(tensor, Tensor), f"{leaf} is a {type(tensor).__name__}; only tensors are saved as state"
            assert leaf not in flat, f"two tensors of the state are called {leaf}"
            flat[leaf] = tensor
    return flat


class Staging:
    """One copy of what this rank writes, in host memory kept between saves: fresh memory costs several copies."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self.shapes: dict[str, Tensor] = {}
        """How the parts of this rank form whole tensors."""
        self.bytes_share = 0
        """Summed over the ranks: the size of the checkpoint."""

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], ranks: int) -> None:
        """Copy what this rank writes; when this returns, the tensors may change."""
        before, self.copies, self.shapes, self.bytes_share = self.copies, {}, {}, 0
        devices = set()
        for name, tensor in tensors.items():
            sharded = is_sharded(tensor)
            local = tensor.to_local() if is_sharded(tensor) else tensor.detach()
            copy = before.get(name)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            copy.copy_(local, non_blocking=local.is_cuda)
            if local.is_cuda:
                devices.add(local.device)
            self.copies[name] = copy
            self.shapes[name] = tensor if sharded else copy
            self.bytes_share += tensor.nbytes // (ranks if sharded else 1)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def select_own_tensors(flat: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """The names of what this rank writes: its parts of sharded tensors, and its share of those that all ranks hold.

    So a save costs a rank of a data-parallel run a share of the time and of the memory. Where the ranks hold different
    tensors (pipeline stages), each writes all of its own.
    """
    if group is None:
        return list(flat)
    whole = {name: tensor for name, tensor in flat.items() if not is_sharded(tensor)}
    described = sorted((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in whole.items())
    digest = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if extremes[0] != -extremes[1]:
        return list(flat)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in whole.items()}
    mine = divide_by_size(sizes, dist.get_world_size(group))[dist.get_rank(group)]
    return [name for name in flat if name not in whole or name in mine]


def divide_by_size(sizes: Mapping[str, int], ranks: int) -> list[set[str]]:
    """Names shared out so that every rank gets about the same number of bytes; each rank computes the same answer."""
    shares: list[set[str]] = [set() for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        shares[lightest].add(name)
        loads[lightest] += sizes[name]
    return shares
