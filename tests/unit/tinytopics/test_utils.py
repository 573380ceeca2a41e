"""Seeds, synthetic counts, and orders."""

import numpy as np
import pytest
import torch

from paceline.tinytopics.utils import align_topics, generate_synthetic_data, set_random_seed, sort_documents


def test_after_the_same_seed_counts_are_those_of_tinytopics():
    """The numbers were drawn by tinytopics 0.9.2."""
    set_random_seed(42)
    X, L, F = generate_synthetic_data(3, 5, 2, avg_doc_length=40)
    assert X.dtype == torch.float32
    assert X.tolist() == [[20, 11, 2, 1, 2], [7, 17, 7, 8, 0], [13, 19, 2, 6, 2]]
    np.testing.assert_allclose(L, [[0.134871, 0.865129], [0.590551, 0.409449], [0.500042, 0.499958]], atol=1e-6)
    np.testing.assert_allclose(F[0], [0.014106, 0.474101, 0.216652, 0.290238, 0.004903], atol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_topics_are_matched_with_those_they_resemble(kind):
    F = np.random.default_rng(0).dirichlet(np.ones(30), 5)
    order = np.array([3, 0, 4, 1, 2])
    found = align_topics(kind(F), kind(F[order]))
    assert found.tolist() == np.argsort(order).tolist()
    assert align_topics(F[:2], F[order]).tolist() == [1, 3]
    assert sorted(align_topics(np.zeros((3, 4)), np.ones((3, 4)))) == [0, 1, 2]


def test_documents_are_sorted_by_their_leading_topic_and_its_share():
    L = np.array([[8, 1, 1], [1, 7, 2], [2, 1, 7], [90, 5, 5], [0, 0, 0], [0, 9, 1]])
    found = sort_documents(L)
    assert found == [3, 0, 4, 5, 1, 2]
    assert all(isinstance(at, int) for at in found)
    assert sort_documents(torch.from_numpy(L)) == found
