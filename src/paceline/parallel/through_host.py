"""Messages between two ranks whose tensors are on a device that gloo cannot send from: they go through host memory.

Collectives of gloo copy by themselves; its send and receive do not. Ranks that share a CUDA device have gloo alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def goes_through_host(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether gloo carries what ranks exchange on a device that is not the host."""
    return device_type != "cpu" and f"{device_type}:gloo" in dist.get_backend_config(group).split(",")


def reachable(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group itself, or one like it that sends from where gloo can."""
    return cast(dist.ProcessGroup, ThroughHost(group)) if goes_through_host(group, device.type) else group


class ThroughHost:
    """A process group as the functions of `torch.distributed` see it; only send and receive are its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __eq__(self, other: object) -> bool:
        """torch finds the ranks of a group in a table of groups."""
        return self._group == (other._group if isinstance(other, ThroughHost) else other)

    def __hash__(self) -> int:
        return hash(self._group)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        return self._group.send([_on_host(tensor) for tensor in tensors], to, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Arrival:
        on_host = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return Arrival(self._group.recv(on_host, source, tag), on_host, tensors)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy, also of what is there already: the caller may write over it before it is sent."""
    return tensor.detach().to("cpu", copy=True).contiguous()


@dataclass
class Arrival:
    """A message under way; it is where it belongs once it was waited for."""

    work: dist.Work
    on_host: Sequence[Tensor]
    tensors: Sequence[Tensor]

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        for tensor, arrived in zip(self.tensors, self.on_host, strict=True):
            tensor.detach().copy_(arrived)
        return True
