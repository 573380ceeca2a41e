"""Found in place of tinytopics while `python -m paceline.tinytopics` runs a program."""

import sys
from importlib import import_module

import paceline.tinytopics

MODULES = {"colors": "plot", "fit_distributed": "fit", "loss": "models"}
MODULES |= {name: name for name in ("data", "fit", "models", "plot", "utils")}
"""Modules of tinytopics, and ours that have their names."""

for name, ours in MODULES.items():
    module = sys.modules[f"{__name__}.{name}"] = import_module(f"paceline.tinytopics.{ours}")
    setattr(paceline.tinytopics, name, module)
sys.modules[__name__] = paceline.tinytopics
