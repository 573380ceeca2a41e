"""What benchmarks/topics.py does beside measuring: rows that sum to one, kept results, tables, counters."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[4] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("topics")
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("topics", None)


@pytest.fixture(scope="module")
def peers(bench):
    return sys.modules["topics_peers"]


@pytest.fixture
def problem(peers):
    return peers.Problem("NIPS", np.ones((4, 5), np.uint8), 2)


def result(peers, **changed):
    row = {"problem": "NIPS", "shape": (4, 5), "k": 2, "name": "tinytopics", "version": "0.9.3", "rounds": 200}
    return peers.Result(**{**row, "seconds": 90.0, "loss": -12.5, "cores": 2, **changed})


def test_factors_of_a_peer_are_normalised_without_changing_a_documents_distribution(peers):
    random = np.random.default_rng(0)
    W, H = random.random((6, 3)), 50 * random.random((3, 7))
    L, F = peers.on_simplex(W, H)
    assert L.sum(1) == pytest.approx(np.ones(6))
    assert F.sum(1) == pytest.approx(np.ones(3))
    product = W @ H
    np.testing.assert_allclose(L @ F, product / product.sum(1, keepdims=True))


def test_the_loss_of_a_peer_does_not_depend_on_how_it_scales_its_factors(peers):
    from paceline.topics import exact_loss

    random = np.random.default_rng(1)
    X = random.poisson(3.0, (6, 7)).astype(np.uint8)
    W, H, scale = random.random((6, 3)), random.random((3, 7)), np.array([1.0, 20.0, 0.1])
    losses = [exact_loss(X, *peers.on_simplex(*pair)) for pair in ((W, H), (W / scale, scale[:, None] * H))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_results_are_kept_and_the_newest_of_the_same_question_counts(peers, problem, tmp_path):
    path = tmp_path / "peers.json"
    assert peers.read_cache(path) == []
    assert peers.read_cache(None) == []
    peers.write_cache(path, [result(peers), result(peers, rounds=100), result(peers, seconds=80.0)])
    kept = peers.read_cache(path)
    assert [(r.rounds, r.seconds, r.cached) for r in kept] == [(200, 80.0, True), (100, 90.0, True)]
    assert "cached" not in json.loads(path.read_text())[0]
    assert [r.rounds for r in kept if r.answers(problem, "tinytopics", "0.9.3", 200)] == [200]
    assert not kept[0].answers(problem, "tinytopics", "0.9.4", 200)


def test_a_kept_result_says_so_and_is_not_computed_again(peers, problem, tmp_path, monkeypatch):
    path = tmp_path / "peers.json"
    sklearn = result(peers, name="scikit-learn", version="1.9", note="beside other work")
    peers.write_cache(path, [result(peers), sklearn])
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)  # nothing is installed
    said = []
    found = peers.peer_results(problem, {"tinytopics": 200, "scikit-learn": 200}, 2, path, said.append)
    assert [r.label for r in found] == [
        "tinytopics 0.9.3, 200 epochs, 2 cores, from cache",
        "scikit-learn 1.9, 200 iterations, 2 cores, from cache",
    ]
    assert not said
    assert not peers.peer_results(problem, {"tinytopics": 3, "scikit-learn": 3}, 2, path, said.append)
    assert all("pip install tinytopics==0.9.3 scikit-learn" in line for line in said)
