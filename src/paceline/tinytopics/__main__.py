"""Run a program that imports tinytopics without a change, with this package in its place.

python -m paceline.tinytopics program.py ARGUMENTS
python -m paceline.tinytopics -m module ARGUMENTS
torchrun --nproc-per-node 2 -m paceline.tinytopics program.py ARGUMENTS
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.launch.command import run_with_stand_in
from paceline.launch.exit_codes import exit_on_known_error

STAND_IN = Path(__file__).with_name("stand_in")


def run_tinytopics_program(words: Sequence[str]) -> None:
    """Run a program or `-m MODULE`, here and in the processes that it starts with our modules as tinytopics."""
    run_with_stand_in(words, STAND_IN, "python -m paceline.tinytopics PROGRAM.py [ARGUMENTS …]")


if __name__ == "__main__":
    with exit_on_known_error():
        run_tinytopics_program(sys.argv[1:])
