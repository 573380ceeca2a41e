"""What ranks do that are started as `torchrun … FILE` starts them: they run the file."""

import runpy
import sys


def run_as_main(file):
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")
