"""A rank that has done its work ends with its exit code, whatever threads of torch still do."""

import subprocess
import sys

RANK = """
import atexit, os, signal, threading, time
import torch
from paceline.launch.signals import exit_rank

def compute():  # a thread that is in torch when the interpreter ends makes it abort
    a = torch.ones(300, 300)
    while True:
        a @ a

threading.Thread(target=compute, daemon=True).start()
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread")), daemon=False).start()
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGUSR1), print("an exit function")))
exit_rank(3)
"""


def test_threads_end_exit_functions_run_and_late_signals_are_ignored():
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.split("\n") == ["a thread", "an exit function", ""]
