"""What ranks do that are started as `torchrun … FILE` starts them: they run the file, or a verb of ours."""

import os
import runpy
import sys

from paceline.cli import main
from paceline.launch.environment import MARK


def run_as_main(file):
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")


def run_verb(words):
    """With the variables that torchrun sets and without our own."""
    del os.environ[MARK]
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code  # noqa: PT017 - any end but success
