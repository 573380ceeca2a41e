"""Run a program that imports another package, with a package of ours found in its place."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UserError


def run_with_stand_in(words: Sequence[str], stand_in: Path, usage: str) -> None:
    """Run SCRIPT.py or `-m MODULE` with its arguments; packages in the folder `stand_in` are found before others.

    The processes that the program starts find them too: by `sys.path`, which multiprocessing hands on, or PYTHONPATH.
    """
    as_module = list(words[:1]) == ["-m"]
    words = list(words[1:] if as_module else words)
    if not words or (words[0].startswith("-") and not as_module):
        raise UserError(f"which program? write it as  {usage}", code="not-found")
    if not as_module and not Path(words[0]).is_file():
        raise UserError(f"{words[0]} is not a file; write it as  {usage}", code="not-found")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stand_in), os.environ.get("PYTHONPATH")]))
    sys.path[0] = str(Path.cwd() if as_module else Path(words[0]).resolve().parent)
    sys.path.insert(1, str(stand_in))
    sys.argv = words
    if as_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
