"""What the ranks of test_start.py do: begin with given weights under many layouts, one after the other."""

import os

import torch
from layout_rows import job_of
from safetensors.torch import load_file
from torch import nn

from paceline import Workload
from paceline.config import build_spec
from paceline.launch.environment import SINGLE_RANK, detect_rank
from paceline.launch.process_group import join_ranks


def started(rows, file):
    """For each (name, spec): whether all that this rank holds is what the file has, and the loss of the first step."""
    place, reference = detect_rank(os.environ) or SINGLE_RANK, load_file(file)
    found = {}
    with join_ranks(place, "cpu", 1, 120) as device:
        for name, spec in rows:
            job = job_of(spec, place, device)
            held = {key: value for part in job.state.model.parts for key, value in part.state_dict().items()}
            same = [torch.equal(whole(value), reference[key].to(value.dtype)) for key, value in held.items()]
            loss_sum, count, *_ = job.train_step(next(job.loader.prefetch(0, 1)), False).tolist()
            found[name] = all(same), len(same), loss_sum / count, job.facts.notes["weights"]["taken"]
    return found


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Scaled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 2))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x):
        return self.scale * self[1](self[0](x))


class Stack(Workload):
    """A model that cannot draw its weights by itself; a buffer of it is in no file."""

    def model(self):
        return Scaled()

    def groups(self, model):
        self.built_empty = all(p.is_meta for p in model.parameters())
        return {}

    def data(self, split):
        return torch.ones(8, 4) if split == "train" else None

    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)


def built_empty(file, match):
    """Under fsdp: whether its model was built without memory, and whether it has the file's weights in the end."""
    values = {"workload": "starting:Stack", "model": {"init_from": str(file), "match": match}}
    parallel = {"ranks": 2, "strategy": "fsdp", "timeout_s": 120}
    spec = build_spec({**values, "train": {"steps": 1, "global_batch": 4}, "parallel": {**parallel, "device": "cpu"}})
    place, reference = detect_rank(os.environ) or SINGLE_RANK, load_file(file)
    with join_ranks(place, "cpu", 1, 120) as device:
        job = job_of(spec, place, device)
        held = job.state.model.net.state_dict()
        same = all(torch.equal(whole(held[key]), value) for key, value in reference.items())
        loss_sum, *_ = job.train_step(next(job.loader.prefetch(0, 1)), False).tolist()
    return job.workload.built_empty, same, loss_sum
