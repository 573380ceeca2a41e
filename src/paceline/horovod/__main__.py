"""`python -m paceline.horovod train.py ARGUMENTS`: a script written for Horovod, as it is.

Its `import horovod.torch` finds the package in `stand_in/`, here and in the processes that it starts. `-m MODULE` runs
a module, as Python does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from paceline.errors import UserError
from paceline.launch.exit_codes import exit_on_known_error

STAND_IN = Path(__file__).with_name("stand_in")
USAGE = "python -m paceline.horovod SCRIPT.py [ARGUMENTS …]"


def run_horovod_script(words: list[str]) -> None:
    as_module = words[:1] == ["-m"]
    words = words[1:] if as_module else words
    if not words or (words[0].startswith("-") and not as_module):
        raise UserError(f"which script? write it as  {USAGE}")
    sys.path[0] = str(Path.cwd() if as_module else Path(words[0]).resolve().parent)
    sys.path.insert(1, str(STAND_IN))
    sys.argv = words
    if as_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif Path(words[0]).is_file():
        runpy.run_path(words[0], run_name="__main__")
    else:
        raise UserError(f"{words[0]} is not a file; write it as  {USAGE}")


if __name__ == "__main__":
    with exit_on_known_error():
        run_horovod_script(sys.argv[1:])
