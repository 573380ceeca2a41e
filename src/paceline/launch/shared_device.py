"""Ranks that share a CUDA device: what gloo cannot do with its tensors goes another way.

| | gloo | here |
|---|---|---|
| sums, broadcasts, all-to-all, gathers into one tensor | through host memory | as it is |
| gathers of functional collectives, by DTensor | reads device memory as host memory: SIGSEGV | into one tensor |
| send and receive | the same | through host memory |

The second is pytorch/pytorch#152645: `_c10d_functional.all_gather_into_tensor` gathers a list of one tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library


@cache
def patch_functional_gathers(dispatch_key: str = "CUDA") -> Library:
    """Let functional collectives gather tensors of a device as `torch.distributed` does, in this process.

    Return the library that holds the patch: once it is freed, torch's own gathers are back.
    """
    library = Library("_c10d_functional", "IMPL")

    def gather(x: Tensor, ranks: int, group: str) -> Tensor:
        out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        found: Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(x, ranks, group, out=out)
        return found

    def gather_each(tensors: Sequence[Tensor], ranks: int, group: str) -> list[Tensor]:
        return [gather(x, ranks, group) for x in tensors]

    library.impl("all_gather_into_tensor", gather, dispatch_key)
    library.impl("all_gather_into_tensor_coalesced", gather_each, dispatch_key)
    return library


def needs_host_copy(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether gloo carries what ranks exchange on a device."""
    return device_type != "cpu" and f"{device_type}:gloo" in dist.get_backend_config(group).split(",")


def route_through_host(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the group, or one like it that sends from host memory."""
    return cast(dist.ProcessGroup, HostRoutedGroup(group)) if needs_host_copy(group, device.type) else group


class HostRoutedGroup:
    """A process group for `torch.distributed` that sends and receives through host memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __eq__(self, other: object) -> bool:
        """torch finds the ranks of a group in a table of groups."""
        return self._group == (other._group if isinstance(other, HostRoutedGroup) else other)

    def __hash__(self) -> int:
        return hash(self._group)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        on_host = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]  # a caller may overwrite it
        return self._group.send(on_host, to, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> "PendingReceive":
        on_host = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return PendingReceive(self._group.recv(on_host, source, tag), on_host, tensors)


@dataclass
class PendingReceive:
    """A message in flight; its tensors are filled when it is waited for."""

    work: dist.Work
    on_host: Sequence[Tensor]
    tensors: Sequence[Tensor]

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        for tensor, arrived in zip(self.tensors, self.on_host, strict=True):
            tensor.detach().copy_(arrived)
        return True
