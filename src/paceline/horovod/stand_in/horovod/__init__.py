"""Found in place of Horovod while `python -m paceline.horovod` runs a script."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import paceline.horovod as torch
from paceline.horovod import async_ops, elastic, functions, optimizer
from paceline.horovod.world import UnsupportedHorovodModule, run

__version__ = "0.28.1"  # whose interface this is
__all__ = ["run", "torch"]


PARTS = ("keras", "tensorflow", "tensorflow.keras", "tensorflow.bridge", "tensorflow.callbacks")
"""Imported when a script asks for them: TensorFlow takes seconds."""


class OwnParts(MetaPathFinder, Loader):
    """Find our modules under Horovod's names, and name the missing part in the error of its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        if name.partition(".")[2] not in PARTS:
            message = f"paceline.horovod has no {name}; it carries over torch, tensorflow and keras"
            raise UnsupportedHorovodModule(message)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        ours = import_module(f"paceline.{spec.name}")
        spec.submodule_search_locations = list(getattr(ours, "__path__", [])) or None
        return ours

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is imported already."""


sys.meta_path.insert(0, OwnParts())
sys.modules |= {
    f"{__name__}.torch": torch,
    f"{__name__}.torch.elastic": elastic,
    f"{__name__}.torch.elastic.sampler": elastic,
    f"{__name__}.torch.elastic.state": elastic,
    f"{__name__}.torch.optimizer": optimizer,
    f"{__name__}.torch.sync_batch_norm": functions,
    f"{__name__}.torch.compression": async_ops,
    f"{__name__}.torch.functions": functions,
    f"{__name__}.torch.mpi_ops": torch,
}
