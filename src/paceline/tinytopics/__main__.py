"""Run a program that imports tinytopics without a change, with this package in its place.

python -m paceline.tinytopics program.py ARGUMENTS
python -m paceline.tinytopics -m module ARGUMENTS
torchrun --nproc-per-node 2 -m paceline.tinytopics program.py ARGUMENTS
"""

import sys
from pathlib import Path

from paceline.launch.command import run_with_stand_in
from paceline.launch.exit_codes import exit_on_known_error

STAND_IN = Path(__file__).with_name("stand_in")


USAGE = "python -m paceline.tinytopics PROGRAM.py [ARGUMENTS …]"

if __name__ == "__main__":
    with exit_on_known_error():
        run_with_stand_in(sys.argv[1:], STAND_IN, USAGE)
