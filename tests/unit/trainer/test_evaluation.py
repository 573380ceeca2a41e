"""Evaluation in a run: a budget, sums of any shape, and the same totals however chunks are divided."""

import numpy as np
import pytest
import torch
from torch import nn

from paceline import RunFailed, Workload, train
from paceline.config import build_spec
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.trainer.evaluation import ChunkSums, sum_chunks


class Histogram(Workload):
    evaluation_chunk = 4

    def model(self):
        return nn.Linear(1, 1)

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


def spec_of(kind, **train):
    parallel = {"device": "cpu", "threads": 1}
    train = {"steps": 2, "global_batch": 4, "evaluate_every": 1, **train}
    return build_spec({"name": "run", "workload": f"{__name__}:{kind}", "train": train, "parallel": parallel})


@pytest.mark.parametrize(("asked", "n"), [("auto", 16), ("all", 30), (7, 7)])
def test_a_part_is_evaluated_and_arrays_are_recorded(asked, n, tmp_path, capsys):
    result = train(spec_of("Histogram", evaluate_on=asked), tmp_path)
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
        train(spec_of("NoScore"), tmp_path, show=False)


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
