"""The topic model in scikit-learn: its own checks, pipelines, searches."""

import sys
from importlib import import_module

import numpy as np
import pytest
import scipy.sparse

from paceline.errors import UserError
from paceline.workloads.topics.result.model import align_topics
from results import expect_error
from topics_fits import collection, em

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from paceline.workloads.topics.estimator import TopicModel

CHECKS = list(estimator_checks_generator(TopicModel(k=2)))


@pytest.mark.parametrize(
    ("model", "check"), CHECKS, ids=[getattr(check, "func", check).__name__ for _, check in CHECKS]
)
def test_the_checks_of_scikit_learn(model, check):
    """All that scikit-learn has for such an estimator."""
    check(model)


@pytest.fixture(scope="module")
def fitted():
    X, _, _ = collection(documents=80)
    return X, TopicModel(k=3).fit(X)


def test_topics_and_mixtures_are_found(fitted):
    X, model = fitted
    _, F, losses = em(X, 3, 500)
    assert model.components_.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert (align_topics(model.components_, F).similarities > 0.99).all()
    assert model.fit_.loss <= losses[-1] + 1e-3 * abs(losses[-1])
    assert model.get_feature_names_out().tolist() == ["topicmodel0", "topicmodel1", "topicmodel2"]
    found = model.transform(X)
    assert found == pytest.approx(model.fit_.L, abs=0.02)
    assert model.transform(scipy.sparse.csr_array(X)) == pytest.approx(found, abs=1e-3)


def test_score_is_of_unseen_words(fitted):
    X, model = fitted
    new, _, _ = collection(documents=30, seed=0)
    assert model.score(new) == pytest.approx(-np.log(model.perplexity(new)))
    assert model.score(new) > TopicModel(k=1).fit(X).score(new)


def test_parameters():
    model = TopicModel(k=4, seed=2)
    assert clone(model).get_params() == {"k": 4, "seed": 2, "starts": 1, "fractional": True, "options": None}
    assert model.set_params(k=5).k == 5
    for k in (0, -1, 2.5, True, "many"):
        with pytest.raises(UserError, match="k="):
            TopicModel(k=k).fit(np.ones((4, 4)))
    with pytest.raises(UserError, match="at most 4"):
        TopicModel().fit(np.ones((4, 5)))
    with pytest.raises(UserError, match="fractional=True"):
        TopicModel(k=1, fractional=False).fit(np.full((4, 5), 0.5))


def test_in_a_pipeline_and_a_search():
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    X, _, terms = collection(documents=60)
    texts = [" ".join(terms[at] for at in np.repeat(np.arange(36), row)) for row in X]
    found = make_pipeline(CountVectorizer(), TopicModel(k=3)).fit_transform(texts)
    assert found.shape == (60, 3)
    search = GridSearchCV(TopicModel(), {"k": [1, 3]}, cv=2).fit(X)
    assert search.best_params_ == {"k": 3}


def test_without_scikit_learn_there_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, TopicModel.__module__)
    with expect_error("not-installed", match="pip install scikit-learn"):
        import_module(TopicModel.__module__)
