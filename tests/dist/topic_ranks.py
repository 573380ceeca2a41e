"""What the ranks of test_tinytopics.py do."""

import contextlib
import io
import os

import torch
import torch.distributed as dist

import paceline.tinytopics as tt
from paceline.tinytopics.fit import _join_device


def fit_three_times(path, folder):
    """(losses, L, F, lines) of fits by new ranks, by joined ones, and by an Accelerator's."""
    assert not dist.is_initialized()
    os.chdir(folder)
    found = [_fit(path, "model.pt")]
    assert dist.is_initialized(), "the group stays for the next fit"
    found.append(_fit(path, None))
    if dist.get_rank() == 0:  # a fit that is not distributed waits for nobody
        tt.fit_model(tt.NumpyDiskDataset(path), 3, num_epochs=2)
    with contextlib.suppress(ImportError):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        assert _join_device() == accelerator.device
        found.append(_fit(path, None))
    return found


def _fit(path, save_path):
    tt.set_random_seed(5 + dist.get_rank() if dist.is_initialized() else 5)
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
        model, losses = tt.fit_model_distributed(tt.NumpyDiskDataset(path), 3, num_epochs=8, save_path=save_path)
    return losses, model.get_normalized_L().numpy(), model.get_normalized_F().numpy(), lines.getvalue()


torch.set_num_threads(1)
