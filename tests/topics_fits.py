"""A small collection with known topics, and a fit of it by the plainest EM there is."""

import json

import numpy as np

from paceline.workloads.topics.result.model import TopicFit


def em(X, k, passes=200, F=None, seed=0):
    """(L, F, losses). With F given, only L is found."""
    chance = np.random.default_rng(seed)
    X = np.asarray(X, float)
    fixed = F is not None
    F = np.asarray(F, float) if fixed else normalised(chance.random((k, X.shape[1])) + 0.1)
    L, losses = np.full((len(X), len(F)), 1 / len(F)), []
    for _ in range(passes):
        ratio = X / np.maximum(L @ F, 1e-30)
        new = normalised(L * (ratio @ F.T))
        F = F if fixed else normalised(F * (L.T @ ratio))
        L = new
        losses.append(len(X) - (X * np.log(np.maximum(L @ F, 1e-30))).sum())
    return L, F, losses


def normalised(values):
    sums = values.sum(axis=1, keepdims=True)
    return np.where(sums > 0, values / np.where(sums > 0, sums, 1), 1 / values.shape[1])


def collection(documents=60, k=3, terms_per_topic=12, words=80, seed=0):
    """(X, L, terms): topics that share no term but the last of each with the next."""
    chance = np.random.default_rng(seed)
    terms = k * terms_per_topic
    F = np.zeros((k, terms))
    for topic in range(k):
        F[topic, topic * terms_per_topic : (topic + 1) * terms_per_topic + 1] = 1
    F = normalised(F * chance.gamma(1.0, size=F.shape))
    L = chance.dirichlet(np.full(k, 0.15), documents)
    X = np.array([chance.multinomial(words, row) for row in L @ F])
    return X, L, [f"word{at}" for at in range(terms)]


def small_fit(documents=60, k=3, seed=0, **facts):
    X, _, terms = collection(documents, k, seed=seed)
    L, F, losses = em(X, k)
    facts = {"terms": terms, "names": [f"paper {at}" for at in range(documents)], "passes": 200} | facts
    return X, TopicFit(L.astype(np.float32), F.astype(np.float32), losses, **facts)


def page_data(text):
    return json.loads(text.split('id="data">', 1)[1].split("</script>", 1)[0])
