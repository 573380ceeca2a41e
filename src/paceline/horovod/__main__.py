"""`python -m paceline.horovod train.py ARGUMENTS`: a script written for Horovod, as it is.

Its imports of `horovod` find the package in `stand_in/`, here and in its child processes. `-m MODULE` runs a module.
"""

import sys
from pathlib import Path

from paceline.launch.command import run_with_stand_in
from paceline.launch.exit_codes import exit_on_known_error

STAND_IN = Path(__file__).with_name("stand_in")


USAGE = "python -m paceline.horovod SCRIPT.py [ARGUMENTS …]"

if __name__ == "__main__":
    with exit_on_known_error():
        run_with_stand_in(sys.argv[1:], STAND_IN, USAGE)
