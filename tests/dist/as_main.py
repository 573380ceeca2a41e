"""What ranks do that are started as `torchrun … FILE` starts them: they run the file, or a verb of ours."""

import os
import runpy
import sys

from paceline.cli.main import main
from paceline.launch.environment import LAUNCHER_VARIABLE


def run_as_main(file):
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")


def run_verb(words):
    """With the variables that torchrun sets and without our own, in a process of its own: a rank leaves for good."""
    del os.environ[LAUNCHER_VARIABLE]
    if not (child := os.fork()):
        try:
            main(words)
        finally:
            os._exit(1)  # whatever ended it but a rank's own way to leave
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
