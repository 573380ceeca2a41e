"""Found in place of Horovod while `python -m paceline.horovod` runs a script: its PyTorch part is ours."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

import paceline.horovod as torch
from paceline.horovod import elastic, functions, optimizer, reduction, sync_batch_norm
from paceline.horovod.unsupported import UnsupportedHorovodModule, run

__version__ = "0.28.1"  # whose interface this is
__all__ = ["run", "torch"]


class MissingParts(MetaPathFinder):
    """Name the missing part of Horovod in the error of its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(f"{__name__}."):
            raise UnsupportedHorovodModule(f"paceline.horovod has no {name}; it carries over {__name__}.torch alone")


sys.meta_path.insert(0, MissingParts())
sys.modules |= {
    f"{__name__}.torch": torch,
    f"{__name__}.torch.elastic": elastic,
    f"{__name__}.torch.elastic.sampler": elastic,
    f"{__name__}.torch.elastic.state": elastic,
    f"{__name__}.torch.optimizer": optimizer,
    f"{__name__}.torch.sync_batch_norm": sync_batch_norm,
    f"{__name__}.torch.compression": reduction,
    f"{__name__}.torch.functions": functions,
    f"{__name__}.torch.mpi_ops": torch,
}
