"""What the ranks of `test_engines.py` do: many runs, one after the other, in one start of the ranks."""

import os
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from paceline.errors import PacelineError
from paceline.launch.environment import SINGLE_RANK, detect_rank
from paceline.launch.process_group import join_ranks
from paceline.launch.signals import StopRequest
from paceline.layout import layout_of
from paceline.runlog.run_dir import RunDir
from paceline.trainer import engines
from paceline.trainer.engines import accelerate, accelerate_config, deepspeed_config, user_config
from paceline.trainer.rank import train_rank
from paceline.workload import build_workload

CONFIG, PLUGIN = deepspeed_config.build_deepspeed_config, accelerate._build_fsdp_plugin
LIES = {
    "stage": lambda: _asks_deepspeed({"zero_optimization": {"stage": 1}}),
    "offload": lambda: _asks_deepspeed({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "alone": lambda: mock.patch.object(engines, "build_launch_variables", return_value=engines.NO_RANK_VARIABLES),
    "whole": lambda: mock.patch.object(accelerate, "_build_fsdp_plugin", _without_layers),
}
"""Ways in which an engine may get something else than the run file says."""


def _without_layers(said):
    return PLUGIN({**said, "fsdp_auto_wrap_policy": "NO_WRAP"})


@contextmanager
def as_on_cuda():
    """On CPUs Accelerate drops FSDP; where it takes them for CUDA devices it does not, and many ranks can be tested."""
    from accelerate.state import DistributedType, PartialState

    several = ("gloo", DistributedType.MULTI_GPU)
    with (
        mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "cpu"}),
        mock.patch.object(PartialState, "_prepare_backend", return_value=several),
    ):
        yield


def at_half(run, copy):
    """A copy of a run, which saved at the half of it and at its end, as it was at the half."""
    shutil.copytree(run, copy)
    shutil.rmtree(max((copy / "checkpoints").iterdir()))
    return copy


def _asks_deepspeed(instead):
    return mock.patch.object(
        deepspeed_config, "build_deepspeed_config", lambda *args: user_config.merge_config(CONFIG(*args), instead)
    )


def train_all(runs, lies=(), kind="cpu"):
    """Train each (folder, spec), or go on with it; then each (lie, folder, spec). {lie: how the run ended}."""
    place = detect_rank(os.environ) or SINGLE_RANK
    failed = {}
    with join_ranks(place, kind, 1, 120) as device:
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
    with ExitStack() as around:
        if spec.parallel.engine == "accelerate":
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)  # one process has one, and here come several
            if device.type == "cpu" and accelerate_config.is_sharding(layout_of(spec)):
                around.enter_context(as_on_cuda())
        train_rank(RunDir(Path(folder)), spec, layout_of(spec), build_workload(spec), place, device, StopRequest())
