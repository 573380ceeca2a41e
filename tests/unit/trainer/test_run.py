"""A run of one rank, as far as it can be seen from outside: what is built how often, what is evaluated and recorded."""

import numpy as np
import pytest
import torch
from torch import nn

from paceline import RunFailed, Workload, train
from paceline.config import build_spec
from paceline.measurement.run_times import select_steady_steps
from paceline.runlog.events import RunStatus, read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import read_summary
from paceline.runlog.timers import TIMES
from paceline.trainer.evaluation import ChunkSums, sum_chunks


def spec_of(kind, **train):
    train = {"global_batch": 4, **train}
    parallel = {"device": "cpu", "threads": 1}
    return build_spec({"name": "run", "workload": f"{__name__}:{kind}", "train": train, "parallel": parallel})


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
    result = train(spec_of("Compiled", steps=12, log_every=1), tmp_path)
    steps = read_steps(RunDir(result.path).events_file(0))
    compiled = [step["step"] for step in steps if step.get("compiled")]
    assert compiled == [1, 3]
    told = read_summary(RunDir(result.path).summary_file)
    assert told.compiled_steps == 2
    assert told.compiled_s == sum(step["step_s"] for step in steps if step.get("compiled"))
    assert "2 steps took" in capfd.readouterr().out
    assert [step["step"] for step in select_steady_steps(steps)] == [6, 7, 8, 9, 10, 11, 12]


def test_a_median_has_no_step_that_compiled_however_late_it_was():
    events = [{"step": i, "compiled": i % 2 == 0, **dict.fromkeys(TIMES, 1.0)} for i in range(1, 9)]
    assert [step["step"] for step in select_steady_steps(events)] == [5, 7]


def test_the_workload_is_built_once_and_the_record_says_how_steps_ran(tmp_path):
    before = Line.built
    result = train(spec_of("Line", steps=3), tmp_path, show=False)
    assert result.status is RunStatus.FINISHED
    assert Line.built == before + 1
    (start,) = read_events(RunDir(result.path).events_file(0), "start")
    assert start["execution"] == "eager: there is no CUDA device"


class Histogram(Line):
    evaluation_chunk = 4

    def data(self, split):
        x = torch.linspace(0, 1, 40 if split == "train" else 30)[:, None]
        return x, (3 * x).long().flatten()

    def loss(self, model, batch):
        x, _ = batch
        return (model(x) - 2 * x).square().sum(), len(x)

    def evaluate(self, model, batch):
        thirds = batch[1].bincount(minlength=4)
        return {**super().evaluate(model, batch), "thirds": thirds, "most": torch.ones(20_000)}


class NoScore(Histogram):
    score = "thirds"


@pytest.mark.parametrize(("asked", "n"), [("auto", 16), ("all", 30), (7, 7)])
def test_a_part_is_evaluated_and_arrays_are_recorded(asked, n, tmp_path, capsys):
    result = train(spec_of("Histogram", steps=2, evaluate_every=1, evaluate_on=asked), tmp_path)
    events = list(read_events(RunDir(result.path).events_file(0), "evaluate"))
    assert [(event["n"], event["of"]) for event in events] == [(n, 30)] * 2
    assert sum(events[0]["thirds"]) == pytest.approx(1)
    assert events[0]["thirds"] == events[1]["thirds"], "the same samples each time"
    assert "most" not in events[0], "too long to be recorded"
    told = result.summary.evaluation
    assert (told.evaluated, told.held_out) == (n, 30)
    assert list(told.arrays) == ["thirds"]
    said = capsys.readouterr().out
    assert ("evaluated on all 30 held-out samples" in said) == (n == 30)
    assert ("of 30 held-out samples, the same ones each time" in said) == (n != 30)


def test_a_score_must_be_a_number(tmp_path):
    with pytest.raises(RunFailed, match="score is 'thirds'"):
        train(spec_of("NoScore", steps=2), tmp_path, show=False)


def test_totals_do_not_depend_on_who_had_which_chunk():
    draw = np.random.default_rng(0)
    tables, losses = torch.from_numpy(draw.integers(0, 9, (7, 2, 3))), torch.from_numpy(draw.normal(size=(7, 3)))
    rows = [{"count": 5, "table": tables[i], "loss": losses[i]} for i in range(7)]
    found = []
    for ranks in (1, 2, 3):
        parts = [ChunkSums() for _ in range(ranks)]
        for chunk, sums in enumerate(rows):
            parts[chunk % ranks].add(chunk, sums)
        found.append(sum_chunks(parts, 7))
    for other in found[1:]:
        assert all(np.array_equal(found[0][name], other[name]) for name in found[0])
    assert found[0]["count"] == 35
    assert found[0]["table"].shape == (2, 3)


def test_an_evaluation_that_is_no_dict_is_refused():
    with pytest.raises(RunFailed, match="evaluate returned float"):
        ChunkSums().add(0, 3.0)
