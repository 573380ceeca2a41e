"""A pass and a fit against plain float64 arithmetic, on random counts of many shapes."""

import copy
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from synthetic_counts import exact_loss
from torch.testing import assert_close

from paceline.workload import FitEnd
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.fitting.least_squares import SweepCounts, find_topics_by_least_squares
from paceline.workloads.topics.fitting.passes import cut_evenly, make_cpu_pass, make_pass
from paceline.workloads.topics.fitting.problem import (
    SampleSize,
    build_problem,
    find_first_topics,
    sample_documents,
)
from paceline.workloads.topics.result.model import align_topics
from paceline.workloads.topics.result.new_documents import infer_mixtures
from paceline.workloads.topics.sections import STARTS, FitOptions
from paceline.workloads.topics.workload import TopicPasses


def problem(n, m, k, seed, high=4):
    """Counts with empty rows and columns among them, and a point."""
    rng = np.random.default_rng(seed)
    X = rng.integers(0, high, (n, m)) * rng.integers(0, 2, (n, m))
    X[rng.random(n) < 0.1] = 0
    X[:, rng.random(m) < 0.1] = 0
    X[0, 0] += 1
    L, F = rng.dirichlet(np.ones(k), n), rng.dirichlet(np.ones(m), k)
    return X, L, F


def by_hand(X, L, F):
    """(EM step of L, statistic of F, loss) in float64."""
    P = L @ F
    R = X / P
    new = L * (R @ F.T)
    size = new.sum(1, keepdims=True)
    return np.where(size > 0, new / np.where(size > 0, size, 1), L), R.T @ L, float(-(X * np.log(P)).sum())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 40), st.integers(1, 20), st.integers(0, 1000), st.sampled_from([4, 300, 70000])
)
@example(20, 30, 64, 3, 4)
@example(20, 30, 65, 3, 4)
@example(20, 30, 512, 3, 4)
def test_a_pass_is_the_em_step(n, m, k, seed, high):
    X, L, F = problem(n, m, k, seed, high)
    L_new, S, loss = by_hand(X, L, F)
    for block, plain in itertools.product((read_counts(c).block(0, n) for c in (X, sp.csr_array(X))), (False, True)):
        found, sums, share = torch.tensor(L, dtype=torch.float32), torch.zeros(m, k), torch.ones(m) / m
        work = make_pass(block, X.sum(1), share, "cpu") if plain else make_cpu_pass(block, share)
        said = float(work(found, torch.tensor(F.T, dtype=torch.float32), sums))
        assert said == pytest.approx(loss, rel=1e-5, abs=1e-4 + 1e-6 * X.sum())  # in float32, p = 1 is not exact
        assert_allclose(found, L_new, rtol=1e-4, atol=1e-6)
        assert_allclose(sums, S, rtol=1e-4, atol=1e-6 * max(1, S.max()))
        B, C = torch.rand(m, 3), torch.rand(n, 3)
        assert_allclose(work.multiply(B), X @ B.numpy(), rtol=1e-4, atol=1e-4)
        assert_allclose(work.multiply_t(C), X.T @ C.numpy(), rtol=1e-4, atol=1e-4)


def test_threads_share_the_rows(monkeypatch):
    for indptr in ([0], [0, 0, 0], [5, 7], [0, 10, 20, 30, 40], [0, 100, 101, 102]):
        parts = cut_evenly(np.array(indptr), 3)
        assert [at for first, last in parts for at in range(first, last)] == list(range(len(indptr) - 1))
    X, L, F = problem(50, 30, 4, 1)
    work = make_cpu_pass(read_counts(sp.csr_array(X)).block(0, 50), torch.ones(30) / 30)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rows, sums = torch.tensor(L, dtype=torch.float32), torch.zeros(30, 4)
        loss = work(rows, torch.tensor(F.T, dtype=torch.float32), sums)
        found.append((float(loss), rows, sums))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert torch.equal(found[0][1], found[1][1])
    assert_close(found[0][2], found[1][2])


@settings(max_examples=10, deadline=None)
@given(st.integers(5, 40), st.integers(5, 40), st.integers(1, 5), st.integers(0, 1000), st.sampled_from(STARTS))
def test_the_loss_never_rises_without_acceleration(n, m, k, seed, start):
    X, _, _ = problem(n, m, k, seed)
    options = FitOptions(start=start, seed=seed, tolerance=0, residual=0, passes=30)
    fit = build_problem(read_counts(sp.csr_array(X))).begin(k, options)
    fit.accelerate = False
    while fit.end is None:
        assert fit.step().accepted
    losses = np.array(fit.losses)
    assert (np.diff(losses) <= 1e-6 * np.abs(losses[1:])).all()


@pytest.fixture(scope="module")
def planted():
    """Documents of three topics that are easy to tell apart."""
    rng = np.random.default_rng(0)
    F = np.vstack([np.kron(np.eye(3)[t], np.ones(20) / 20) for t in range(3)]) * 0.9 + 0.1 / 60
    L = rng.dirichlet(np.full(3, 0.3), 200)
    return rng.poisson(200 * L @ F).astype(np.uint8), L, F


def begin(X, k=3, check=1, **options):
    fit = build_problem(read_counts(X)).begin(k, FitOptions(**{"start": "random", "seed": 1, **options}))
    fit.check = check
    return fit


def complete(fit):
    while fit.end is None:
        fit.step()
    return fit


@pytest.mark.parametrize(("check", "good", "unknown"), [(1, 5, 0), (5, 1, 4)])
def test_a_leap_too_far_is_taken_back(planted, check, good, unknown):
    """After a higher loss the fit goes on from the last image whose loss is known."""
    fit = begin(planted[0], check=check)
    for _ in range(good):
        fit.step()
    L, Ft = (part.clone() for part in fit.result())
    assert [fit.step().loss for _ in range(unknown)] == fit.losses * unknown
    fit.L.fill_(1 / 3)
    fit.Ft.fill_(1e-9)  # all but one term: far above what it was
    assert not fit.step().accepted
    assert torch.equal(fit.L, L)
    assert torch.equal(fit.Ft, Ft)
    assert fit.end is None
    before = fit.losses[-1]
    assert fit.step().loss <= before


def test_acceleration_takes_fewer_passes_and_a_loss_at_every_fifth_is_enough(planted):
    reached = []
    for check in (1, 5):
        fit = complete(begin(planted[0], check=check, tolerance=1e-8, passes=2000))
        assert fit.converged
        assert (np.diff(fit.losses) <= 1e-7 * fit.losses[-1]).all()
        reached.append((fit.final_loss(), fit.passes, len(fit.losses)))
    slow = begin(planted[0], tolerance=1e-8, passes=2000)
    slow.accelerate = False
    assert complete(slow).converged
    (loss, passes, losses), (same, more, fewer) = reached
    assert passes < slow.passes
    assert loss <= slow.losses[-1] * (1 + 1e-7)
    assert same == pytest.approx(loss, rel=5e-6)
    assert more < 2 * passes
    assert fewer < losses / 2


def overshooting():
    """A fit with a loss at every fifth pass that is above its best point from pass 117 to 120."""
    rng = np.random.default_rng(0)
    L, F = rng.dirichlet(np.full(4, 0.3), 40), rng.dirichlet(np.full(30, 0.3), 4)
    return read_counts(rng.poisson(20 * L @ F).astype(np.uint8)), {"start": "random", "seed": 2}


def test_wherever_it_ends_the_result_is_not_above_a_loss_that_was_kept():
    counts, settings = overshooting()
    fit, went_back = begin(counts, 6, check=5, **settings, tolerance=0, residual=0, passes=300), 0
    while fit.end is None:
        fit.step()
        ended = copy.deepcopy(fit)
        last, reached = ended._compute_loss(), ended.final_loss()
        assert reached <= fit.losses[-1] * (1 + 1e-7)
        L, Ft = ended.result()
        assert reached == pytest.approx(exact_loss(counts, L.numpy(), Ft.T.numpy()))
        went_back += reached < last
    assert went_back > 3


@pytest.mark.parametrize("cut", [1, 7, 50, 117, 119, 120, 121, 122, 125])
def test_a_fit_with_few_losses_goes_on_from_a_checkpoint_as_if_there_had_been_none(cut):
    """Also where the next loss says that the fit must go back further than the checkpoint."""
    counts, settings = overshooting()

    def passes():
        return TopicPasses(
            build_problem(counts), 6, FitOptions(**settings, tolerance=0, residual=0, passes=131), settings
        )

    whole = passes()
    whole.begin()
    whole.fit.check = 5
    while whole.end is None:
        if whole.fit.passes == cut:
            saved, meta = copy.deepcopy(whole.tensors()), json.loads(json.dumps(whole.meta()))
        found = whole.step(False)
    losses = whole.fit.losses
    assert found["gain"] == pytest.approx((losses[-2] - losses[-1]) / 5 / losses[-1])

    again = passes()
    for entry, tensors in again.allocate_state({}).items():
        for name, tensor in tensors.items():
            tensor.copy_(saved[entry][name])
    again.load_state(meta)
    again.fit.check = 5
    while again.end is None:
        again.step(False)
    assert again.fit.losses == losses
    assert again.final_loss == whole.final_loss
    assert all(map(torch.equal, again.fit.result(), whole.fit.result()))


def test_a_fit_ends_when_its_topics_no_longer_change_and_its_progress_never_falls():
    rng = np.random.default_rng(1)
    X = rng.poisson(12 * rng.dirichlet(np.full(6, 0.5), 200) @ rng.dirichlet(np.full(150, 0.2), 6))
    options = FitOptions(tolerance=1e-9, passes=3000)
    passes = TopicPasses(build_problem(read_counts(sp.csr_array(X))), 6, options, {})
    passes.begin()
    shares, earlier = [], None
    while passes.end is None:
        done = passes.step(False)
        shares.append(passes.fit.passes * passes.samples / done["of_samples"])
        if passes.fit.passes == 50:
            earlier = passes.fit.result()[1].clone()
        if passes.fit.passes == 100:
            moved = (passes.fit.result()[1] - earlier).abs().sum() / 2 / 6
            assert passes.fit.drifted == pytest.approx(float(moved))
            passes.fit.drifted = 4e-5
    assert (np.diff(shares) >= -1e-12).all()
    assert shares[-1] == 1
    assert passes.end is FitEnd.CONVERGED
    assert passes.fit.passes == 101
    assert "0.004 %" in passes.end_words()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_first_topics(planted, start, kind):
    X, _, F = planted
    counts = read_counts(X if kind == "dense" else sp.csr_array(X))
    per_term = X.sum(0).astype(np.float64)
    found = find_first_topics(counts, per_term, 3, start=start, seed=2)
    assert torch.equal(found, find_first_topics(counts, per_term, 3, start=start, seed=2))
    assert_allclose(found.sum(0), 1, rtol=1e-5)
    assert float(found.min()) > 0
    if start != "random":
        assert align_topics(found.T, F).similarities.min() > 0.9


def start_by_least_squares(X, k, turns):
    products = SimpleNamespace(multiply=lambda B: X @ B, multiply_t=lambda C: X.T @ C)
    return find_topics_by_least_squares(products, X.sum(1).double(), X.sum(0).double(), k, 0, turns)


@pytest.mark.parametrize("turns", [SweepCounts(), SweepCounts(sample=150)])
def test_planted_topics_are_found_by_least_squares(turns):
    """A document and a term without counts are among them."""
    random = torch.Generator().manual_seed(0)
    L, F = (torch.empty(*shape).exponential_(generator=random) for shape in ((400, 5), (5, 300)))
    L, F = L / L.sum(1, keepdim=True), F / F.sum(1, keepdim=True)
    X = torch.poisson(3000 * (L @ F), generator=random)
    X[7], X[:, 11] = 0, 0
    Ft = start_by_least_squares(X, 5, turns)
    assert align_topics(Ft.T, F).similarities.min() > 0.98
    assert (Ft >= 0).all()
    assert_close(Ft.sum(0), torch.ones(5))


@pytest.mark.parametrize("rank", [1, 2])
def test_fewer_patterns_than_topics_give_numbers(rank):
    patterns = np.eye(rank, 30, dtype=np.float32).repeat(10, 0) * 5
    assert torch.isfinite(start_by_least_squares(torch.from_numpy(patterns), 6, SweepCounts())).all()


def test_a_sample_is_spread_over_all_documents():
    size = SampleSize(nonzeros=1000, rows=100, counts=1000)
    X = sp.csr_array(np.repeat(np.arange(1, 5001)[:, None], 3, 1))
    few = sample_documents(read_counts(X), 0, size=size)
    values = few.block(0, few.documents).values.data[::3]
    assert 300 <= few.documents < 500
    assert values.min() < 200
    assert values.max() > 4800


def test_streamed_is_the_same_as_in_memory(planted, tmp_path):
    from paceline.workloads.topics.files.reading import convert

    X, _, _ = planted
    np.save(tmp_path / "x.npy", X)
    convert(X, tmp_path / "shards", shard_bytes=2000)
    reached = []
    for source in (X, sp.csr_array(X), tmp_path / "x.npy", tmp_path / "shards"):
        fit = complete(begin(source, start="least_squares", seed=0, passes=25))
        reached.append((fit.losses[-1], fit.result()))
    for loss, (L, Ft) in reached[1:]:
        assert loss == pytest.approx(reached[0][0], rel=1e-6)
        assert_close(L, reached[0][1][0], rtol=1e-3, atol=1e-5)
        assert_close(Ft, reached[0][1][1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("k", [3, 70])
def test_documents_do_not_depend_on_each_other(planted, k):
    X, _, F = planted
    F = F if k == 3 else np.random.default_rng(0).dirichlet(np.ones(60), k)
    X = X.copy()
    X[7] = 0
    whole, loss = infer_mixtures(read_counts(sp.csr_array(X)), F.astype(np.float32))
    assert loss == pytest.approx(exact_loss(X, whole, F), rel=1e-6)
    assert_allclose(whole[7], 1 / k, rtol=1e-5)
    for at in (0, 50, 199):
        alone, _ = infer_mixtures(read_counts(X[at : at + 1]), F.astype(np.float32))
        assert_allclose(alone[0], whole[at], atol=2e-3)


def test_no_document_is_left_half_way():
    """A Newton step from a corner can be too long, and must be taken back."""
    rng = np.random.default_rng(0)
    F = np.kron(np.eye(3), rng.gamma(1.0, size=12)) + 1e-9
    F /= F.sum(1, keepdims=True)
    X = np.array([rng.multinomial(80, row) for row in rng.dirichlet(np.full(3, 0.15), 300) @ F])
    found, _ = infer_mixtures(read_counts(X), F.astype(np.float32), tolerance=1e-9)
    L = np.full((300, 3), 1 / 3)
    for _ in range(3000):
        L, _, _ = by_hand(X, L, F)
    above = (X * (np.log(L @ F) - np.log(found @ F))).sum(1)
    assert above.max() < 1e-3
