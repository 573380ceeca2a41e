"""What the ranks of `test_engines.py` do: many runs, one after the other, in one start of the ranks."""

import os
from pathlib import Path
from unittest import mock

from paceline.engines import accelerate, deepspeed_config, own_file, surroundings
from paceline.errors import PacelineError
from paceline.launch.environment import ALONE, detect
from paceline.launch.group import joined
from paceline.launch.signals import StopRequest
from paceline.record.run_dir import RunDir
from paceline.training.rank import _train, silent

CONFIG = deepspeed_config.config
LIES = {
    "stage": lambda: _asks_deepspeed({"zero_optimization": {"stage": 1}}),
    "clip": lambda: _asks_deepspeed({"gradient_clipping": 1.0}),
    "offload": lambda: _asks_deepspeed({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "alone": lambda: mock.patch.object(accelerate, "as_torchrun_says", surroundings_of_one),
}
"""Ways in which an engine may get something else than the run file says."""


def surroundings_of_one(place, device):
    return surroundings.alone()


def _asks_deepspeed(instead):
    return mock.patch.object(deepspeed_config, "config", lambda *args: own_file.laid_over(CONFIG(*args), instead))


def train_all(runs, lies=()):
    """Train each (folder, spec), or go on with it; then each (lie, folder, spec). {lie: how the run ended}."""
    place = detect(os.environ) or ALONE
    failed = {}
    with joined(place, "cpu", 1, 60) as device:
        for folder, spec in runs:
            _train_one(folder, spec, place, device)
        for lie, folder, spec in lies:
            try:
                with LIES[lie]():
                    _train_one(folder, spec, place, device)
            except PacelineError as error:
                failed[lie] = str(error)
    return failed


def _train_one(folder, spec, place, device):
    if spec.parallel.engine == "accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # one process has one, and here come several
    _train(RunDir(Path(folder)), spec, place, device, StopRequest(), silent, False)
