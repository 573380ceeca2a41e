"""A run of one rank, as far as it can be seen from outside: what is built how often, and what the record says."""

import torch
from torch import nn

from paceline import Workload, train
from paceline.config import build_spec
from paceline.measurement.run_times import select_steady_steps
from paceline.runlog.events import RunStatus, read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.runlog.timers import TIMES
from paceline.trainer import loop


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


class Compiled(Line):
    """Compiles a part of its loss, and again for the last batch of an epoch, which is smaller."""

    def __init__(self, spec):
        super().__init__(spec)
        self.squares = torch.compile(lambda x: x.square().sum(), backend="eager", dynamic=False)

    def loss(self, model, batch):
        return self.squares(model(batch) - 2 * batch), len(batch)


def test_steps_that_compile_are_their_own_line_and_in_no_median(tmp_path, capfd):
    train_section = {"steps": 12, "global_batch": 4, "log_every": 1}
    spec = build_spec(
        {"name": "c", "workload": f"{__name__}:Compiled", "train": train_section, "parallel": {"device": "cpu"}}
    )
    result = train(spec, tmp_path)
    steps = read_steps(RunDir(result.path).events_file(0))
    compiled = [step["step"] for step in steps if step.get("compiled")]
    assert compiled == [1, 3]
    told = read_summary(RunDir(result.path).summary_file)
    assert told.compiled_steps == 2
    assert told.compiled_s == sum(step["step_s"] for step in steps if step.get("compiled"))
    assert "2 steps took" in capfd.readouterr().out
    assert [step["step"] for step in select_steady_steps(steps)] == [6, 7, 8, 9, 10, 11, 12]


def test_steps_that_are_read_together_with_one_that_compiled_are_in_no_median(tmp_path, monkeypatch):
    """As on a CUDA device, where a few steps are read at a time, and each is said to have taken their mean."""
    torch.compiler.reset()

    class FewAtATime(loop.StepLog):
        def __init__(self, job):
            super().__init__(job)
            self.every = 5

    monkeypatch.setattr(loop, "StepLog", FewAtATime)
    spec = build_spec(
        {"name": "c", "workload": f"{__name__}:Compiled", "train": {"steps": 12, "global_batch": 4, "log_every": 5},
         "parallel": {"device": "cpu"}}
    )  # fmt: skip
    steps = read_steps(RunDir(train(spec, tmp_path, show=False).path).events_file(0))
    took = {step["step"]: step["step_s"] for step in steps}
    assert [step["step"] for step in steps if step.get("compiled")] == [1, 2, 3]
    assert took[2] == took[3]
    assert len({took[step] for step in (1, 3, 4)}) == 3
    assert took[4] == took[5]
    assert all(step["step"] > 3 for step in select_steady_steps(steps))


def test_a_median_has_no_step_that_compiled_however_late_it_was():
    events = [{"step": i, "compiled": i % 2 == 0, **dict.fromkeys(TIMES, 1.0)} for i in range(1, 9)]
    assert [step["step"] for step in select_steady_steps(events)] == [5, 7]


def test_the_workload_is_built_once_and_the_record_says_how_steps_ran(tmp_path):
    parallel = {"device": "cpu"}
    spec = build_spec(
        {"name": "line", "workload": f"{__name__}:Line", "train": {"steps": 3, "global_batch": 4}, "parallel": parallel}
    )
    before = Line.built
    result = train(spec, tmp_path, show=False)
    assert result.status is RunStatus.FINISHED
    assert Line.built == before + 1
    (start,) = read_events(RunDir(result.path).events_file(0), "start")
    assert start["execution"] == "eager: there is no CUDA device"
