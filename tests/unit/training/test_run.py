"""A run of one rank, as far as it can be seen from outside: what is built how often, and what the record says."""

import torch
from torch import nn

from paceline import Workload, train
from paceline.record.events import Status, read_events
from paceline.record.run_dir import RunDir
from paceline.spec import build


class Numbers:
    def __len__(self):
        return 10

    def cost(self, ids):
        return ids % 3 + 1

    def batch(self, ids, keys):
        return torch.from_numpy(ids).float()[:, None]


class Line(Workload):
    built = 0

    def __init__(self, spec):
        super().__init__(spec)
        Line.built += 1

    def model(self):
        return nn.Linear(1, 1)

    def data(self, split):
        return Numbers() if split == "train" else None

    def loss(self, model, batch):
        return (model(batch) - 2 * batch).square().sum(), len(batch)


def test_the_workload_is_built_once_and_the_record_says_how_steps_ran(tmp_path):
    parallel = {"device": "cpu"}
    spec = build(
        {"name": "line", "workload": f"{__name__}:Line", "train": {"steps": 3, "global_batch": 4}, "parallel": parallel}
    )
    before = Line.built
    result = train(spec, tmp_path, show=False)
    assert result.status is Status.FINISHED
    assert Line.built == before + 1
    (start,) = read_events(RunDir(result.path).events_file(0), "start")
    assert start["execution"] == "eager: there is no CUDA device"
