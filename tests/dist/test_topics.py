"""A topic model on real ranks: the answer of one rank, also after a kill."""

import shutil

import numpy as np
import pytest
from as_main import run_verb
from synthetic_counts import generate_synthetic_data

import paceline.topics as pt
from paceline import resume, train
from paceline.config import build_spec
from paceline.launch.local import run_ranks
from paceline.runlog.events import read_events, read_steps
from paceline.runlog.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("warm_ranks")
K = 4


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
    assert all(step["comm_s"] > 0 for step in read_steps(RunDir(run.path).events_file(ranks - 1)))


def test_the_same_as_in_one_process(counts, on_one):
    agree(pt.fit(counts, K, tolerance=0, passes=60), model_of(on_one))


def test_what_was_cut_off_is_resumed_on_other_ranks(counts, on_one, tmp_path):
    """From step 30 to the answer of one rank; then as if killed before the model was written."""
    folder = RunDir(train(spec_of(counts, 2, checkpoint_every=10, keep=9), tmp_path, show=False).path)
    for step in (40, 50, 60):
        shutil.rmtree(folder.checkpoints / f"step-{step:08d}")
    run = resume(folder.path, ["parallel.ranks=1"], show=False)
    assert [event["step"] for event in read_events(folder.events_file(0), "resume")] == [30]
    agree(model_of(run), model_of(on_one))
    (folder.path / "model.safetensors").unlink()
    again = resume(folder.path, show=False)
    assert again.status == "finished"
    agree(model_of(again), model_of(on_one))
    assert len(read_steps(folder.events_file(0))) == 60


def test_ranks_of_torchrun(counts, on_one, tmp_path):
    words = ["topics", str(counts), "-k", str(K), "--passes", "60", "--tolerance", "0", "--out", str(tmp_path / "fit")]
    run_ranks(run_verb, ([*words, "--quiet"],), 2)
    agree(pt.TopicFit.load(tmp_path / "fit" / "model.safetensors"), model_of(on_one))
