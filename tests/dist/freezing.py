"""A classifier whose chosen rank does not go on at a chosen moment: stopped as by `kill -STOP`, or stuck in its code.

PACELINE_TEST_FREEZE="evaluation 1"    the phase and the rank; "stuck" is a phase too: samples that never come
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.trainer import rank
from paceline.trainer.checkpoint.writer import CheckpointWriter
from paceline.workloads.classifier.workload import Classifier

FREEZE = "PACELINE_TEST_FREEZE"
MARKER = "PACELINE_TEST_MARKER"
"""A file that is touched then, the first time."""
LONG_S = 600.0


def reached(phase):
    """Stops this process, if it is the one and the time is now."""
    if _now(phase):
        os.kill(os.getpid(), signal.SIGSTOP)


def _now(phase):
    found = os.environ.get(FREEZE) == f"{phase} {os.environ.get('RANK')}"
    if found and MARKER in os.environ and not (marker := Path(os.environ[MARKER])).exists():
        marker.touch()
    return found


class Freezing(Classifier):
    def data(self, split):
        samples = super().data(split)
        if "RANK" in os.environ and samples is not None:
            reached("start")
            return Stopping(samples)
        return samples

    def loss(self, model, batch):
        reached("step")
        if _now("elsewhere"):
            dist.broadcast(torch.zeros(1), 0)
        return super().loss(model, batch)

    def evaluate(self, model, batch):
        reached("evaluation")
        return super().evaluate(model, batch)

    @property
    def callback_state(self):
        reached("checkpoint")
        return {}

    @callback_state.setter
    def callback_state(self, value):
        pass


def before(place, name, phase):
    """Let what `place` calls by that name come to the phase first."""
    whole = getattr(place, name)

    def paused(*args):
        reached(phase)
        return whole(*args)

    setattr(place, name, paused)


if FREEZE in os.environ:
    before(CheckpointWriter, "_write_rank_files", "writing")
    before(rank, "_gather_peaks", "end")


class Stopping:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getattr__(self, name):
        return getattr(self.samples, name)

    def batch(self, ids, keys):
        reached("data")
        if _now("stuck"):
            wait_for_a_lock_that_nobody_gives_back()
        return self.samples.batch(ids, keys)


def wait_for_a_lock_that_nobody_gives_back():
    time.sleep(LONG_S)
