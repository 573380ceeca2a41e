"""A topic model on real ranks: the answer of one rank, also after a kill."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import yaml
from as_main import run_verb
from ending import wait_until
from synthetic_counts import generate_synthetic_data

import paceline.topics as pt
from paceline import resume, train
from paceline.config import build_spec
from paceline.launch.local import run_ranks
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir
from paceline.trainer.checkpoint.reader import find_newest

pytestmark = pytest.mark.usefixtures("warm_ranks")
K = 4
CRAWL = """
import time, paceline.workloads.topics.fitting.engine as engine
step, passes = engine.AcceleratedEM.step, []

def crawl(self, flag=False):
    "Quick until there is a checkpoint, and then slower than any test that looks for it."
    passes.append(self.all_documents == 301)
    time.sleep(2 if sum(passes) > 12 else 0)
    return step(self, flag)

engine.AcceleratedEM.step = crawl
"""


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    file = tmp_path_factory.mktemp("counts") / "x.npy"
    X, _, _ = generate_synthetic_data(n=301, m=90, k=K, avg_doc_length=60, seed=3, sparse=False)
    np.save(file, np.asarray(X))
    return file


def spec_of(counts, ranks, **train_values):
    run = {"name": f"on{ranks}", "workload": "topics", "model": {"k": K, "tolerance": 0}}
    run |= {"data": {"path": str(counts)}, "parallel": {"ranks": ranks, "threads": 1}}
    return build_spec({**run, "train": {"steps": 60, **train_values}})


@pytest.fixture(scope="module")
def on_one(counts, tmp_path_factory):
    return train(spec_of(counts, 1), tmp_path_factory.mktemp("one"), show=False)


def model_of(run):
    return pt.TopicFit.load(run.path / "model.safetensors")


def agree(found, expected):
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert np.abs(found.L - expected.L).max() < 1e-4
    assert np.abs(found.F - expected.F).max() < 1e-6


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_answer_is_that_of_one_rank(counts, on_one, tmp_path, ranks):
    """301 documents do not divide by 2 or 3."""
    run = train(spec_of(counts, ranks), tmp_path, show=False)
    assert run.status == "finished"
    agree(model_of(run), model_of(on_one))
    steps = read_steps(RunDir(run.path).events_file(ranks - 1))
    assert len(steps) == 60
    assert all(step["comm_s"] > 0 for step in steps)
    assert run.summary.parameters == K * (301 + 90)


def test_the_same_as_in_one_process(counts, on_one):
    agree(pt.fit(counts, K, tolerance=0, passes=60), model_of(on_one))


def test_killed_and_resumed_on_other_ranks(counts, on_one, tmp_path):
    """Killed in the middle of passes; what goes on from the last checkpoint ends as if nothing had happened."""
    spec = spec_of(counts, 2, checkpoint_every=10)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(spec.dump()))
    (tmp_path / "sitecustomize.py").write_text(CRAWL)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", str(file), "--out", str(tmp_path / "runs"), "--quiet"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    )
    folder = RunDir(tmp_path / "runs" / "on2")
    assert wait_until(lambda: find_newest(folder.checkpoints, lambda text: None), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reached = find_newest(folder.checkpoints, lambda text: None).step
    assert 10 <= reached < 60
    run = resume(folder.path, ["parallel.ranks=1"], show=False)
    assert run.status == "finished"
    assert next(read_events(folder.events_file(0), "resume"))["step"] >= 10
    agree(model_of(run), model_of(on_one))
    (folder.path / "model.safetensors").unlink()  # as if killed before it was written
    again = resume(folder.path, show=False)
    assert again.status == "finished"
    agree(model_of(again), model_of(on_one))
    assert len(read_steps(folder.events_file(0))) == 60


def test_ranks_of_torchrun(counts, on_one, tmp_path):
    words = ["topics", str(counts), "-k", str(K), "--passes", "60", "--tolerance", "0", "--out", str(tmp_path / "fit")]
    run_ranks(run_verb, ([*words, "--quiet"],), 2)
    agree(pt.TopicFit.load(tmp_path / "fit" / "model.safetensors"), model_of(on_one))
