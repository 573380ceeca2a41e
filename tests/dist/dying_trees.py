"""Trees of which one rank is killed in the middle of a run, once."""

import os
import signal
from pathlib import Path

from paceline.workloads.trees.passes import TreePasses
from paceline.workloads.trees.workload import Trees

KILLED_AFTER = 5
MARK = "PACELINE_TEST_KILLED"


class DyingPasses(TreePasses):
    def step(self, flag):
        mark = Path(os.environ[MARK])
        if self.done == KILLED_AFTER and self.place.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(flag)


class DyingTrees(Trees):
    def passes(self, device):
        found = super().passes(device)
        return DyingPasses(found.boosting, found.train)
