"""The grid of ranks as torch's device mesh: one axis per way of spreading the work."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from paceline.launch.group import group_of_one
from paceline.layout import Layout

AXES = ("pipeline", "replicate", "shard", "tensor")
"""From slow to fast: neighbours on the last axis are neighbouring ranks, as `Layout.data_rank` has it."""


def mesh_of(layout: Layout, device: torch.device, timeout_s: float) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """(the grid, the group of the ranks that hold the same layers as this one); all groups give up after that time."""
    group_of_one(device)
    mesh = init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)
    stage = mesh["replicate", "shard", "tensor"]._flatten("stage").get_group()
    for group in (*mesh.get_all_groups(), stage):
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh, stage
