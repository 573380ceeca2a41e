"""What the ranks of test_start.py do: begin with given weights under many layouts, one after the other."""

import os

import torch
from layout_rows import job_of
from safetensors.torch import load_file

from paceline.launch.environment import ALONE, detect
from paceline.launch.group import joined


def started(rows, file):
    """For each (name, spec): whether all that this rank holds is what the file has, and the loss of the first step."""
    place, reference = detect(os.environ) or ALONE, load_file(file)
    found = {}
    with joined(place, "cpu", 1, 120) as device:
        for name, spec in rows:
            job = job_of(spec, place, device)
            held = {key: value for part in job.state.model.parts for key, value in part.state_dict().items()}
            same = [torch.equal(whole(value), reference[key].to(value.dtype)) for key, value in held.items()]
            loss_sum, count, *_ = job.train_step(next(job.loader.prefetch(0, 1)), False).tolist()
            found[name] = all(same), len(same), loss_sum / count, job.facts.notes["weights"]["taken"]
    return found


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
