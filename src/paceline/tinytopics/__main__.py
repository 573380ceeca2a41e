"""Run a program that imports tinytopics without a change, with this package in its place.

python -m paceline.tinytopics program.py ARGUMENTS
torchrun --nproc-per-node 2 -m paceline.tinytopics program.py ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import paceline.tinytopics
from paceline.errors import UserError
from paceline.launch.exit_codes import exit_on_known_error

MODULES = {
    "colors": "plot",
    "data": "data",
    "fit": "fit",
    "fit_distributed": "fit",
    "loss": "models",
    "models": "models",
    "plot": "plot",
    "utils": "utils",
}
"""Modules of tinytopics, and ours that have their names."""


def run_tinytopics_program(words: Sequence[str]) -> None:
    """Run the program that the first word names; the others are its arguments."""
    if not words or not Path(words[0]).is_file():
        given = f"{words[0]}: there is no such file" if words else "which program?"
        raise UserError(f"{given}; type  python -m paceline.tinytopics PROGRAM.py", code="not-found")
    install_stand_in()
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def install_stand_in() -> None:
    """Let `import tinytopics` and imports of its modules find this package."""
    sys.modules["tinytopics"] = paceline.tinytopics
    for name, ours in MODULES.items():
        sys.modules[f"tinytopics.{name}"] = import_module(f"paceline.tinytopics.{ours}")


if __name__ == "__main__":
    with exit_on_known_error():
        run_tinytopics_program(sys.argv[1:])
