"""Losses that jump and ranks that are slow become events, once each."""

import os
from types import SimpleNamespace

import pytest

from paceline.launch.environment import RankInfo
from paceline.launch.heartbeat import Heartbeat
from paceline.runlog.events import EventWriter, read_events
from paceline.runlog.run_dir import RunDir
from paceline.trainer import anomalies
from paceline.trainer.anomalies import AnomalyDetector


@pytest.fixture
def main(tmp_path):
    """(what notices on rank 0 of three, what it wrote)."""
    place = RankInfo(0, 3, 0, 3, "paceline", "127.0.0.1", 1)
    run = RunDir(tmp_path)
    with EventWriter(run.events_file(0)) as events, Heartbeat(run.heartbeats, place, 300.0) as beat:
        context = SimpleNamespace(folder=tmp_path, rank_info=place, beat=beat, event=events.write)
        yield AnomalyDetector(context), lambda: list(read_events(run.events_file(0), "notice"))


def step(number, loss=1.0, busy_s=0.1):
    return {"step": number, "loss": loss, "compute_s": busy_s, "data_s": 0.0}


def test_a_loss_that_jumps_is_noticed_once(main):
    noticed, found = main
    losses = [3.0 - 0.01 * i + 0.02 * (i % 3) for i in range(60)] + [9.0, 9.5, 2.4, float("nan"), 2.4]
    for number, loss in enumerate(losses, 1):
        noticed.observe(step(number, loss))
    (notice,) = found()
    assert (notice["about"], notice["step"], notice["loss"]) == ("loss", 61, 9.0)
    assert notice["text"].startswith("the loss jumps to 9 at step 61; before, it was about 2.7")


def test_a_noisy_loss_is_no_news(main):
    noticed, found = main
    for number in range(200):
        noticed.observe(step(number, 1.0 + 0.3 * ((number * 37) % 11) / 11))
    assert not found()


def test_a_rank_that_works_longer_than_the_others_is_named(main, monkeypatch):
    noticed, found = main
    monkeypatch.setattr(anomalies, "LOOK_EVERY_S", 0.0)
    noticed.look_at = 0.0
    others = [RankInfo(rank, 3, rank, 3, "paceline", "127.0.0.1", 1) for rank in (1, 2)]
    beats = [Heartbeat(noticed.folder, place, 1e6) for place in others]
    for beat, busy_s in zip(beats, (0.1, 0.25), strict=True):
        beat("step", 3, busy_s)
    for number in range(4):
        noticed.observe(step(number))
    for beat in beats:
        beat.__exit__(None)
    (notice,) = found()
    assert (notice["about"], notice["rank"], notice["busy_s"], notice["others_s"]) == ("straggler", 2, 0.25, 0.1)
    host = os.uname().nodename
    assert notice["text"] == f"rank 2 on {host} works 250 ms on a step, the others 100 ms: they wait for it"
