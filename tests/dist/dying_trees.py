"""Trees of which one rank is killed or stopped in the middle of a run, once."""

import os
import signal
from pathlib import Path

from paceline.workloads.trees.workload import TreePasses, Trees

STRUCK_AFTER = 5
MARK = "PACELINE_TEST_STRUCK"


class DyingPasses(TreePasses):
    signal = signal.SIGKILL

    def step(self, flag):
        mark = Path(os.environ[MARK])
        if self.done == STRUCK_AFTER and self.rank_info.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), self.signal)
        return super().step(flag)


class StoppedPasses(DyingPasses):
    signal = signal.SIGSTOP


class DyingTrees(Trees):
    struck = DyingPasses

    def passes(self, device):
        found = super().passes(device)
        return self.struck(found.job, found.train)


class StoppedTrees(DyingTrees):
    struck = StoppedPasses
