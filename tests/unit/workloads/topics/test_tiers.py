"""Documents that do not fit on the device: brought over in blocks, with the same result."""

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.testing import assert_close

from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.fitting import tiers
from paceline.workloads.topics.fitting.passes import JoinedProducts
from paceline.workloads.topics.fitting.tiers import TieredDocuments


def counts(sparse):
    X = np.random.default_rng(3).poisson(0.7, (103, 57)).astype(np.uint8)
    X[5] = 0
    return X, read_counts(scipy.sparse.csr_array(X) if sparse else X)


@pytest.fixture
def free(monkeypatch):
    """Set the bytes that counts may take on the device; blocks are small."""
    monkeypatch.setattr(tiers, "BLOCK_BYTES", 1000)
    return lambda size: monkeypatch.setattr(tiers, "get_free_device_bytes", lambda device: size)


def one_pass(documents, k=4):
    random = torch.Generator().manual_seed(0)
    L, Ft = torch.rand(103, k, generator=random) + 0.1, torch.rand(57, k, generator=random) + 0.1
    L, Ft, S = L / L.sum(1, keepdim=True), Ft / Ft.sum(0), torch.zeros(57, k)
    loss = sum(step(L[first:last], Ft, S) for first, last, step in documents.steps())
    return L, S, float(loss)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("device_bytes", [0, 40 * 256, 1 << 30])
def test_what_is_streamed_gives_the_same_as_what_is_resident(sparse, device_bytes, free):
    X, source = counts(sparse)
    q = X.sum(0) / X.sum()
    whole = TieredDocuments(source, X.sum(1), q, "cpu")
    free(device_bytes)
    some = TieredDocuments(source, X.sum(1), q, "cpu")
    assert len(list(whole.steps())) == 1
    if device_bytes < 1 << 30:
        assert len(list(some.steps())) > 1
        assert len(some.resident) == (device_bytes > 0)
        held = sum(sum(part.nbytes for part in source.block(*rows).parts) for *rows, _ in some.resident)
        assert 5 * held <= device_bytes or not sparse  # nonzeros are sorted on the device
    for a, b in zip(one_pass(whole), one_pass(some), strict=True):
        assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=1e-6)
    B = torch.rand(57, 3, generator=torch.Generator().manual_seed(1))
    assert_close(JoinedProducts(some.steps, 57).multiply(B), torch.from_numpy(X).float() @ B)
    C = torch.rand(103, 3, generator=torch.Generator().manual_seed(1))
    assert_close(JoinedProducts(some.steps, 57).multiply_t(C), torch.from_numpy(X).float().T @ C)
