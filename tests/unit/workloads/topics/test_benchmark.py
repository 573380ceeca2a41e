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


def test_an_empty_document_and_an_empty_topic_become_even(peers):
    W, H = np.array([[0.0, 0.0], [1.0, 3.0]]), np.array([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    L, F = peers.on_simplex(W, H)
    np.testing.assert_allclose(L, [[0.5, 0.5], [1, 0]])
    np.testing.assert_allclose(F, [[0.25, 0.25, 0.5], [1 / 3] * 3])


def test_time_to_a_loss_is_that_of_the_first_pass_at_or_below_it(bench):
    trace = [(0.5, 10.0), (0.6, 8.0), (0.7, 9.0), (0.8, 7.0)]
    assert bench.first_below(8.0, trace) == (2, 0.6)
    assert bench.first_below(6.0, trace) is None


def test_report_of_a_race(bench, peers, problem):
    class Ours:
        loss, seconds = -13.0, 2.0
        model = type("Model", (), {"passes": 30, "stopped_because": "converged"})

        def reach(self, loss):
            return (4, 0.5) if loss > self.loss else None

        def exact_after(self, passes):
            return -12.75

    text = bench.race_report(problem, [result(peers), result(peers, name="scikit-learn", loss=-14.0)], Ours())
    row = next(line for line in text.splitlines() if "200 epochs" in line)
    assert row.split()[-6:] == ["-12", "0.50", "4", "-13", "180x", "100x"]
    assert "not reached" in text
    assert "at or below the loss of both: NO" in text


def test_counter_of_the_loopback(bench):
    lines = (
        "Inter-| Receive | Transmit",
        "  eth0: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0",
        "    lo: 55 2 0 0 0 0 0 0 66 2 0 0 0 0 0 0",
    )
    assert bench.loopback_bytes("\n".join(lines)) == 66
    assert bench.expected_bytes(20, 1000, 2) == 80_000
    assert bench.expected_bytes(20, 1000, 4) == 120_000


def test_generated_file_repeats_its_documents(bench, tmp_path):
    pool = np.arange(21, dtype=np.uint8).reshape(3, 7)
    bench.write_npy(tmp_path / "x.npy", pool, 8, "float32")
    written = np.load(tmp_path / "x.npy")
    assert written.dtype == np.float32
    np.testing.assert_array_equal(written, pool[[0, 1, 2, 0, 1, 2, 0, 1]])
