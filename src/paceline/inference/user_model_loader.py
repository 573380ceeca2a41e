"""A model that was trained with Paceline, and does not need it: torch, safetensors and what its own file imports do.

from load import load
model = load()      # of the folder that this file is in: a torch.nn.Module with the trained weights
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class StandIn:
    """For the classes of Paceline that the file derives from, where Paceline is not installed."""

    def __init__(self, spec: Any = None, **values: Any) -> None:
        self.spec = spec
        self.__dict__.update(values)


def install_stand_ins(source: str) -> None:
    """Install empty modules for all of Paceline that the file imports."""
    for name in {"paceline", *re.findall(r"^\s*(?:from|import)\s+(paceline[\w.]*)", source, re.MULTILINE)}:
        module = ModuleType(name)
        module.__getattr__ = lambda _: StandIn  # type: ignore[method-assign]
        module.field = lambda default, *_, **__: default  # type: ignore[attr-defined]
        sys.modules[name] = module


def load(folder: str | Path = Path(__file__).parent) -> torch.nn.Module:
    """Return the model in eval mode; run its exported file, and leave it and any stand-ins in `sys.modules`."""
    from safetensors.torch import load_file

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    file = folder / config["file"]
    replaced = hasattr(sys.modules.get("paceline"), "StandIn")  # by an earlier call: find_spec rejects stand-ins
    if replaced or importlib.util.find_spec("paceline") is None:
        install_stand_ins(file.read_text("utf-8"))
    found = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
    sys.modules[file.stem] = module
    found.loader.exec_module(module)  # type: ignore[union-attr]
    kind = getattr(module, config["class"])
    sections = {}
    for name, section in (("model", getattr(kind, "Model", StandIn)), ("data", getattr(kind, "Data", StandIn))):
        sections[name] = getattr(section, "model_construct", section)(**config[name])
    workload = kind(StandIn(**sections, train=StandIn(**config["train"])))
    workload.kept = folder / "kept"
    model = workload.model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


if __name__ == "__main__":
    print(load())
