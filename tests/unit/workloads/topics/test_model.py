"""The result of a fit: its file, its terms, new documents, quality."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.errors import RunFailed, UserError
from paceline.workloads.topics.counts.matrices import to_dense, to_sparse
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.result import model
from paceline.workloads.topics.result.model import TopicFit, align_topics, find_largest, sort_documents
from paceline.workloads.topics.result.new_documents import split_in_halves
from results import expect_error
from topics_fits import collection, em, small_fit

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(max_size=8)


@pytest.fixture(scope="module")
def fitted():
    return small_fit()


def same(a, b):
    assert a.L.dtype == b.L.dtype == np.float32
    for one, other in zip(vars(a).values(), vars(b).values(), strict=True):
        np.testing.assert_equal(one, other)


@QUICK
@given(terms=st.lists(TEXT, min_size=36, max_size=36), loss=st.floats(), header_bytes=st.sampled_from([100, 1 << 20]))
def test_what_is_saved_is_loaded(tmp_path, fitted, terms, loss, header_bytes):
    """Long lists of names go beside the arrays."""
    loss = loss if math.isfinite(loss) else 0.5
    made = replace(fitted[1], terms=terms, loss=loss, converged=True, settings={"text": {"at": terms[0]}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "HEADER_BYTES", header_bytes)
        same(made, TopicFit.load(made.save(tmp_path / "fit.safetensors")))
    bare = replace(made, terms=None, names=None, losses=[])
    same(bare, TopicFit.load(bare.save(tmp_path / "fit.safetensors")))


@QUICK
@given(at=st.floats(0, 0.9999), flip=st.integers(1, 255), cut=st.booleans())
@example(at=0.0, flip=255, cut=False)
@example(at=0.999, flip=1, cut=False)
@example(at=0.999, flip=1, cut=True)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, fitted, at, flip, cut):
    whole = fitted[1].save(tmp_path / "fit.safetensors").read_bytes()
    place, other = int(at * len(whole)), tmp_path / "other.safetensors"
    other.write_bytes(whole[:place] + (b"" if cut else bytes([whole[place] ^ flip]) + whole[place + 1 :]))
    told = ""
    try:
        same(fitted[1], TopicFit.load(other))
    except UserError as error:
        told = str(error)
    assert str(other) in told or not (told or cut)
    assert "\n" not in told


def test_other_files_are_refused(tmp_path, fitted):
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "weights.safetensors")
    for code, read in {
        "invalid-format": lambda: TopicFit.load(tmp_path / "weights.safetensors"),
        "not-found": lambda: TopicFit.load(tmp_path / "none.safetensors"),
        "invalid-value": lambda: fitted[1].save(tmp_path / "fit.pkl"),
    }.items():
        with expect_error(code):
            read()
    with pytest.raises(RunFailed, match="nowhere"):
        fitted[1].save(tmp_path / "nowhere" / "fit.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["weights.safetensors"]


def test_top_terms_by_probability_and_by_lift():
    F = np.array([[0.5, 0.4, 0.1, 0, 0], [0.5, 0, 0, 0.3, 0.2]], np.float32)
    made = TopicFit(np.array([[1, 0], [0, 1]], np.float32), F, terms=["the", "cat", "dog", "sun", "rain"])
    assert made.top_terms(2) == [["the", "cat"], ["the", "sun"]]
    assert made.top_terms(1, by="lift") == [["cat"], ["sun"]]
    assert made.top_terms(99)[0][:3] == ["the", "cat", "dog"]
    with pytest.raises(UserError, match="probability or lift"):
        made.top_terms(by="size")
    made.terms = None
    assert made.top_terms(1) == [["term 0"], ["term 0"]]


def test_lift_passes_over_terms_that_are_hardly_used():
    F = np.full((2, 100), 1e-9)
    F[0, :10], F[1, 10:20] = 0.1, 0.1
    F[0, 4] = 0.15
    F[0, 50] = 1e-6  # in topic 0 a thousand times more often than in the other, and yet next to never
    made = TopicFit(np.eye(2, dtype=np.float32), F.astype(np.float32))
    found = made.top_term_numbers(10, by="lift")[0]
    assert set(found) == set(range(10))
    assert found[0] == 4  # of terms with the same lift, the most probable


@given(arrays(np.float32, st.integers(1, 60), elements=st.floats(-5, 5, width=32)), st.integers(1, 70))
def test_largest_is_a_sort(values, n):
    assert find_largest(values, n).tolist() == np.argsort(-values, kind="stable")[:n].tolist()


def test_shares_and_order_of_topics(fitted):
    _, made = fitted
    assert made.topic_shares().sum() == pytest.approx(1, abs=1e-5)
    lengths = np.zeros(len(made.L))
    lengths[5] = 30
    assert made.topic_shares(lengths) == pytest.approx(made.L[5], abs=1e-6)
    in_order = made.sort_topics()
    assert (np.diff(in_order.topic_shares()) <= 0).all()
    assert np.abs(in_order.L @ in_order.F - made.L @ made.F).max() < 1e-6
    assert made.sort_topics([2, 0, 1]).F[0] == pytest.approx(made.F[2])
    with pytest.raises(UserError, match="topics 0 to 2"):
        made.sort_topics([0, 0, 1])
    with pytest.raises(UserError, match="3 lengths for 60"):
        made.topic_shares(np.ones(3))


def test_it_tells_what_it_is(fitted):
    made = replace(fitted[1], losses=[9.0, 8.5], loss=math.nan, terms=["<b>"] * 36)
    assert made.loss == 8.5
    assert "&lt;b&gt;" in made._repr_html_()
    assert "<b>" not in made._repr_html_()
    for wrong in ({"F": np.ones((4, 36))}, {"terms": ["a", "b"]}):
        with expect_error("invalid-value"):
            replace(made, **wrong)


@QUICK
@given(k=st.integers(1, 8), seed=st.integers(0, 99))
def test_topics_are_aligned_with_a_reference(k, seed):
    chance = np.random.default_rng(seed)
    reference = chance.dirichlet(np.full(30, 0.1), k)
    shuffle = chance.permutation(k)
    order, similar = align_topics(reference[shuffle] + 1e-4 * chance.random((k, 30)), reference)
    assert shuffle[order].tolist() == list(range(k))
    assert (similar > 0.99).all()


def test_topics_without_a_counterpart_come_last():
    ours = np.eye(4)
    order, similar = align_topics(ours, ours[[3, 1]])
    assert order.tolist() == [3, 1, 0, 2]
    assert similar[:2] == pytest.approx(1)
    assert np.isnan(similar[2:]).all()
    with pytest.raises(UserError, match=r"2 topics .* with 4"):
        align_topics(ours[:2], ours)
    with pytest.raises(UserError, match="over 4 and over 3 terms"):
        align_topics(ours, ours[:, :3])


@QUICK
@given(arrays(np.float32, st.tuples(st.integers(1, 30), st.integers(1, 5)), elements=st.floats(0, 1, width=32)))
def test_documents_are_sorted_once_each_and_by_topic(L):
    order = sort_documents(L)
    assert sorted(order.tolist()) == list(range(len(L)))
    assert (np.diff(L.argmax(axis=1)[order]) >= 0).all()


def test_transform_finds_the_mixtures(fitted):
    _, made = fitted
    new, _, _ = collection(documents=20, seed=0)
    expected, _, _ = em(new, 3, 2000, F=made.F)
    for given_as in (new, scipy.sparse.csr_array(new), read_counts(new)):
        found = made.transform(given_as)
        assert found.shape == (20, 3)
        assert found.sum(axis=1) == pytest.approx(1, abs=1e-5)
        assert np.abs(found - expected).max() < 0.02


def test_texts_are_counted_as_in_training():
    X, made = small_fit()
    words = [" ".join(made.term(at).upper() for at in np.repeat(np.arange(36), row)) for row in X[:4]]
    assert made.transform(words) == pytest.approx(made.transform(X[:4]), abs=1e-4)
    assert made.transform(words[0] + " and unheard") == pytest.approx(made.transform(X[:1]), abs=1e-4)
    made.settings["text"] = {"stop_words": ["unheard"], "min_df": 1}
    assert made.transform(f"{words[0]} unheard") == pytest.approx(made.transform(X[:1]), abs=1e-4)
    made.terms = None
    with pytest.raises(UserError) as caught:
        made.transform(["a text"])
    assert caught.value.key == "terms"


def test_files_of_texts_and_of_counts(tmp_path):
    X, made = small_fit()
    words = [" ".join(made.term(at) for at in np.repeat(np.arange(36), row)) for row in X[:3]]
    (tmp_path / "new.txt").write_text("\n".join(words))
    np.save(tmp_path / "new.npy", X[:3])
    expected = made.transform(X[:3])
    for path in (tmp_path / "new.txt", str(tmp_path / "new.npy")):
        assert made.transform(path) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(UserError, match=r"old\.npy"):
        made.transform(str(tmp_path / "old.npy"))


def test_columns_must_agree(fitted):
    X, made = fitted
    with pytest.raises(UserError, match=r"35 columns .* 36 terms"):
        made.transform(X[:, 1:])
    swapped = list(made.terms)
    swapped[4:6] = swapped[5], swapped[4]
    with pytest.raises(UserError, match=r"column 4 .*'word5'"):
        made.transform(replace(read_counts(X), vocabulary=swapped))


def halves_of(X, seed):
    parts = split_in_halves(to_sparse(X), np.random.default_rng(seed))
    assert all((part.data > 0).all() for part in parts)
    return [to_dense(part, X.shape[1]).astype(float) for part in parts]


@QUICK
@given(arrays(np.uint16, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.integers(0, 900)), st.booleans())
def test_halves_make_the_whole(X, fractions):
    X = X.astype(np.float32) / 2 if fractions else X
    assert np.array_equal(sum(halves_of(X, 0)), X)


def test_perplexity_by_the_definition(fitted):
    X, made = fitted
    dense = halves_of(X[:10], 3)
    p = 0.99 * (made.transform(dense[0]) @ made.F) + 0.01 / 36
    expected = math.exp(-(dense[1] * np.log(p)).sum() / dense[1].sum())
    assert made.perplexity(X[:10], seed=3) == pytest.approx(expected, rel=1e-4)


def test_what_cannot_be_scored_is_refused(fitted):
    with pytest.raises(UserError, match="no document has two words"):
        fitted[1].perplexity(np.eye(36, dtype=int)[:2])
    with pytest.raises(UserError, match="smoothing=2"):
        fitted[1].perplexity(fitted[0], smoothing=2)
    with pytest.raises(UserError, match="pairs of terms"):
        fitted[1].coherence(fitted[0], 1)


@QUICK
@given(seed=st.integers(0, 999), n=st.integers(2, 5))
def test_coherence_is_the_mean_over_pairs(seed, n):
    chance = np.random.default_rng(seed)
    X = chance.poisson(chance.random(9) * 2, (12, 9))
    made = TopicFit(np.ones((12, 2), np.float32), chance.dirichlet(np.ones(9), 2).astype(np.float32))
    there = X > 0
    for topic, found in enumerate(made.coherence(X, n)):
        values = []
        for i, j in itertools.combinations(np.argsort(-made.F[topic])[:n], 2):
            both, a, b = (there[:, i] & there[:, j]).mean(), there[:, i].mean(), there[:, j].mean()
            values.append(-1 if not both else 1 if both == 1 else math.log(both / (a * b)) / -math.log(both))
        assert found == pytest.approx(np.mean(values), abs=1e-6)
