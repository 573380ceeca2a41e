"""The kernels of topic models against float64: on a GPU, or on the CPU under TRITON_INTERPRET=1."""

import os

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from psutil import virtual_memory
from synthetic_counts import exact_loss

import paceline.topics as pt
from paceline.workloads.topics.counts.arrays import DeviceCounts, from_tensor
from paceline.workloads.topics.counts.matrices import Csr, DocumentBlock
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.fitting.least_squares import sweep_columns_in_torch
from paceline.workloads.topics.fitting.passes import make_pass
from paceline.workloads.topics.fitting.tiers import TieredDocuments, sum_counts

pytest.importorskip("triton", reason="no Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LARGE = not INTERPRETED


def problem(n, m, k, dtype, density=0.6, seed=0):
    """Counts with an empty document and an empty term, and factors that are not at the optimum."""
    random = np.random.default_rng(seed)
    largest = {"uint8": 255, "uint16": 60_000, "int32": 200_000, "float32": 9}[dtype]
    X = random.poisson(2.0, (n, m)) * (random.random((n, m)) < density)
    X[0, :2] = largest
    X = X.astype(dtype)
    if dtype == "float32":
        X *= np.float32(0.5)
    X[n // 2], X[:, m // 2] = 0, 0
    L = random.random((n, k)) + 0.05
    F = random.random((m, k)) + 0.05
    return X, L / L.sum(1, keepdims=True), F / F.sum(0)


def reference(X, L, Ft):
    X = X.astype(np.float64)
    P = L @ Ft.T
    R = X / P
    new = L * (R @ Ft)
    norm = new.sum(1, keepdims=True)
    new = np.where(norm > 0, new / np.maximum(norm, 1e-300), L)
    return R.T @ L, new, -(X * np.log(P)).sum()


def as_csr(X):
    rows, columns = X.nonzero()
    pointer = np.concatenate([[0], np.cumsum((X != 0).sum(1))]).astype(np.int64)
    return Csr(pointer, columns.astype(np.int32), X[rows, columns])


def run(X, L, Ft, *, sparse, loss=True):
    per_document = torch.from_numpy(X.astype(np.float64).sum(1))
    share = X.astype(np.float64).sum(0) + 0.5
    step = make_pass(DocumentBlock(0, as_csr(X) if sparse else X), per_document, share / share.sum(), DEVICE)
    rows_of_L = torch.tensor(L, dtype=torch.float32, device=DEVICE)
    S = torch.zeros(Ft.shape, device=DEVICE)
    value = step(rows_of_L, torch.tensor(Ft, dtype=torch.float32, device=DEVICE), S, loss=loss)
    return S.double().cpu().numpy(), rows_of_L.double().cpu().numpy(), float(value)


def error(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def assert_near(found, X, L, Ft, near=1e-3, loss_near=1e-5):
    """Compare (S, new rows, loss) with those of float64."""
    (S, new, loss), (S_true, new_true, loss_true) = found, reference(X, L, Ft)
    assert error(S, S_true) < near
    assert error(new, new_true) < near
    assert abs(loss - loss_true) < loss_near * abs(loss_true)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
@pytest.mark.parametrize("k", [3, 20, 40, 100, 200, 512])
def test_the_dense_pass_equals_float64(dtype, k):
    if INTERPRETED and k > 40 and dtype != "uint8":
        pytest.skip("slow in the interpreter")
    X, L, Ft = problem(*((700, 1100) if LARGE else (70, 300)), k, dtype)
    S, new, loss = run(X, L, Ft, sparse=False)
    assert_near((S, new, loss), X, L, Ft)
    without = run(X, L, Ft, sparse=False, loss=False)
    assert without[2] == 0
    assert max(error(without[0], S), error(without[1], new)) < 1e-6
    assert not S[X.shape[1] // 2].any()
    assert_allclose(new[X.shape[0] // 2], L[X.shape[0] // 2], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
@pytest.mark.parametrize("k", [3, 20, 100, 512])
def test_the_sparse_pass_equals_float64(dtype, k):
    X, L, Ft = problem(*((700, 1100) if LARGE else (20, 150)), k, dtype, density=0.1)
    assert_near(run(X, L, Ft, sparse=True), X, L, Ft, near=1e-4, loss_near=1e-6)


def test_a_document_without_the_first_topic():
    """Where the counts end in the middle of a tile, the shares of the others have to do."""
    X, L, Ft = problem(60, 130, 5, "uint8")
    L[3], L[3, 1] = 1e-20, 1.0
    assert_near(run(X, L, Ft, sparse=False), X, L, Ft)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("host_bytes", [0, 30_000, 1 << 30])
def test_documents_that_do_not_fit_on_the_device(sparse, host_bytes, monkeypatch):
    X, L, Ft = problem(300, 200, 5, "uint8", density=0.1)
    source = read_counts(X)
    if sparse:
        import scipy.sparse

        source = read_counts(scipy.sparse.csr_array(X))
    share = (X.sum(0) + 0.5) / (X.sum(0) + 0.5).sum()
    free = 100 * 256 * (2 if sparse else 1)
    monkeypatch.setattr("paceline.workloads.topics.fitting.tiers.get_free_device_bytes", lambda device: free)
    monkeypatch.setattr("paceline.workloads.topics.fitting.tiers.HOST_SHARE", host_bytes / virtual_memory().available)
    monkeypatch.setattr("paceline.workloads.topics.fitting.tiers.BLOCK_BYTES", 8000)
    tiers = TieredDocuments(source, X.sum(1), share, DEVICE)
    for _ in range(2):  # the second pass uses what the first kept
        rows_of_L = torch.tensor(L, dtype=torch.float32, device=DEVICE)
        F = torch.tensor(Ft, dtype=torch.float32, device=DEVICE)
        S = torch.zeros_like(F)
        loss = sum(step(rows_of_L[first:last], F, S) for first, last, step in tiers.steps())
        assert_near((S.double().cpu().numpy(), rows_of_L.double().cpu().numpy(), float(loss)), X, L, Ft)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_products(sparse, dtype):
    X, L, Ft = problem(70, 300, 30, dtype)
    step = make_pass(DocumentBlock(0, as_csr(X) if sparse else X), X.sum(1), np.full(300, 1 / 300), DEVICE)
    B = torch.tensor(Ft - Ft.mean(), dtype=torch.float32, device=DEVICE)
    C = torch.tensor(L, dtype=torch.float32, device=DEVICE)
    X = torch.from_numpy(X.astype(np.float64))
    assert error(step.multiply(B).double().cpu().numpy(), (X @ B.double().cpu()).numpy()) < 2e-3
    assert error(step.multiply_t(C).double().cpu().numpy(), (X.T @ C.double().cpu()).numpy()) < 2e-3


def test_the_kernel_for_least_squares_equals_plain_sweeps():
    from paceline.workloads.topics.fitting.triton_passes import solve_columns

    random = torch.Generator().manual_seed(0)
    basis = torch.randn(12, 5, generator=random)
    target, free = torch.randn(5, 300, generator=random), torch.rand(5, 300, generator=random)
    gram = basis.T @ basis
    device = free.to(DEVICE, copy=True)
    solve_columns(target.to(DEVICE), gram.to(DEVICE), device, 3)
    sweep_columns_in_torch(target, gram, free, 3)
    torch.testing.assert_close(device.cpu(), free, rtol=1e-4, atol=1e-4)


def planted(n, m, k, words, seed=0):
    """Counts of documents that are mixtures of k topics, and what they were drawn from."""
    random = np.random.default_rng(seed)
    L, F = random.dirichlet(np.full(k, 0.4), n), random.dirichlet(np.full(m, 0.4), k)
    X = random.poisson(words * (L @ F))
    X[n // 2], X[:, m // 2] = 0, 0
    return X, L, F


def there(X, dtype="int64", sparse=False):
    tensor = torch.tensor(X).to(getattr(torch, dtype)).to(DEVICE)
    return from_tensor(tensor.float().to_sparse_csr() if sparse else tensor)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_sums_on_the_device(dtype):
    X = np.random.default_rng(0).integers(0, 256 if dtype == "uint8" else 65_536, (1100, 700))
    per_document, per_term = sum_counts(there(X, dtype))
    assert_array_equal(per_document.cpu(), X.sum(1))
    assert_array_equal(per_term.cpu(), X.sum(0))


@pytest.mark.parametrize(("dtype", "sparse"), [("uint8", False), ("int32", False), ("float32", True)])
def test_a_fit_of_counts_on_the_device_reaches_the_loss_of_the_cpu(dtype, sparse):
    """Both to the end, from their own starts; the losses in float64."""
    X, L, F = planted(*((2000, 600, 5, 800) if LARGE else (60, 50, 3, 400)))
    if dtype == "int32":
        X = 300 * X
    model = pt.fit(there(X, dtype, sparse), k=F.shape[0], tolerance=1e-8, passes=1000 if LARGE else 60)
    same = pt.fit(X, k=F.shape[0], tolerance=1e-8, device="cpu")
    reached, wanted = exact_loss(X, model.L, model.F), exact_loss(X, same.L, same.F)
    assert reached == pytest.approx(wanted, rel=1e-6 if LARGE else 1e-4)
    assert model.loss == pytest.approx(reached, rel=1e-6)
    assert reached < exact_loss(X, L, F)


@pytest.mark.skipif(INTERPRETED, reason="there is no host to copy to")
@pytest.mark.parametrize("sparse", [False, True])
def test_a_fit_of_a_cuda_tensor_leaves_the_counts_there(sparse, monkeypatch):
    monkeypatch.setattr(DeviceCounts, "block", lambda *_: pytest.fail("counts were copied to the host"))
    X, _, F = planted(3000, 400, 4, 500)
    tensor = torch.tensor(X, dtype=torch.float32, device=DEVICE)
    model = pt.fit(tensor.to_sparse_csr() if sparse else tensor, k=4)
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (model.F, F)]
    assert (unit[0] @ unit[1].T).max(1).min() > 0.99


def test_many_documents_are_added_up_without_loss():
    """One topic is the shares of the terms, however many documents there are. Ratios of dense counts are halves, and
    here there are only a few of them, whose rounding does not cancel."""
    n = 1_000_000 if LARGE else 60
    random = np.random.default_rng(0)
    X = np.zeros((n, 2), np.uint8)
    X[np.arange(n), random.integers(0, 2, n)] = random.integers(1, 4, n)
    for sparse, within in ((False, 1e-3), (True, 1e-5)):
        model = pt.fit(there(X, "uint8", sparse), k=1, passes=3, start="random")
        assert_allclose(model.F[0], X.sum(0, dtype=np.int64) / X.sum(dtype=np.int64), rtol=within)
