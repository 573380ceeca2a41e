"""Counts that stay on their device, with the CPU as the device."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from numpy.testing import assert_array_equal
from synthetic_counts import exact_loss, generate_synthetic_data

import paceline.topics as pt
from paceline.errors import UserError
from paceline.workloads.topics.counts.arrays import from_tensor
from paceline.workloads.topics.counts.matrices import Csr
from paceline.workloads.topics.files.reading import read_counts
from paceline.workloads.topics.fitting import passes
from paceline.workloads.topics.fitting.passes import pad_to_tiles
from paceline.workloads.topics.fitting.problem import SampleSize, build_problem, sample_documents
from paceline.workloads.topics.fitting.tiers import sum_counts

pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning")


@pytest.fixture(scope="module")
def made():
    X, _, _ = generate_synthetic_data(n=150, m=90, k=3, avg_doc_length=500, seed=2, sparse=False)
    X[7], X[:, 11] = 0, 0
    return X.astype(np.int64)


def csr(X, dtype=torch.float32):
    return torch.tensor(X, dtype=dtype).to_sparse_csr()


@pytest.mark.parametrize("start", ["auto", "least_squares", "random"])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "bfloat16", None])
def test_a_fit_is_that_of_the_same_counts_on_the_host(made, dtype, start):
    there = from_tensor(torch.tensor(made).to(getattr(torch, dtype)) if dtype else csr(made))
    assert there.tensors[-1].dtype == torch.uint8
    model, same = (pt.fit(X, k=3, start=start) for X in (there, made if dtype else sp.csr_array(made)))
    assert model.loss == pytest.approx(same.loss, rel=1e-5)
    assert model.loss == pytest.approx(exact_loss(made, model.L, model.F), rel=1e-6)
    assert exact_loss(there, model.L, model.F) == pytest.approx(exact_loss(made, model.L, model.F), rel=1e-12)


def test_nonzeros_that_are_given_twice_or_are_zero_are_no_problem(made):
    pointer, index, count = (part.numpy() for part in from_tensor(csr(made)).values)
    pieces = [(index[a:b], count[a:b]) for a, b in pairwise(pointer)]
    twice = torch.sparse_csr_tensor(
        torch.from_numpy(3 * pointer),
        torch.from_numpy(np.concatenate([np.concatenate([j, j, j]) for j, _ in pieces])),
        torch.from_numpy(np.concatenate([np.concatenate([x, x, 0 * x]) for _, x in pieces])),
        size=made.shape,
    )
    model, same = pt.fit(from_tensor(twice), k=3), pt.fit(2 * made, k=3)
    assert model.loss == pytest.approx(same.loss, rel=1e-5)


def test_the_smallest_type_is_taken(made, monkeypatch):
    for largest, dtype in ((255, torch.uint8), (256, torch.uint16), (65_536, torch.int32)):
        X = made.copy()
        X[0, 0] = largest
        for tensor in (torch.tensor(X), torch.tensor(X).double(), torch.tensor(X).int()):
            there = from_tensor(tensor)
            assert there.values.dtype == dtype
            assert_array_equal(there.block(3, 9).values, X[3:9])
            per_document, per_term = sum_counts(there)
            assert_array_equal(per_document, X.sum(1))
            assert_array_equal(per_term, X.sum(0))
        there = from_tensor(csr(X))
        assert there.values[2].dtype == dtype
        for piece in (passes.PIECE, 8 * 7):
            monkeypatch.setattr(passes, "PIECE", piece)
            assert_array_equal(sum_counts(there)[0], X.sum(1))
            assert_array_equal(sum_counts(there)[1], X.sum(0))
    halves = from_tensor(torch.tensor(made) * 0.5, fractional=True)
    assert halves.values.dtype == torch.float32
    same = torch.tensor(made, dtype=torch.uint8)
    assert from_tensor(same).values.data_ptr() == same.data_ptr()


def test_other_bad_tensors():
    wrong = torch.sparse_csr_tensor([0, 1, 2], [0, 9], [1.0, 1.0], size=(2, 3), check_invariants=False)
    for tensor in (torch.zeros(3), torch.zeros(3, 3, dtype=torch.complex64), wrong):
        with pytest.raises(UserError, match=r"^the tensor: "):
            from_tensor(tensor)
    for zeros in (torch.zeros(5, 6, dtype=torch.uint8), torch.zeros(5, 6).to_sparse_csr()):
        with pytest.raises(UserError, match="are zero"):
            pt.fit(from_tensor(zeros), k=2)
    for dtype in (torch.float32, torch.uint8):
        with pytest.raises(UserError, match="meta"):
            pt.fit(torch.empty(9, 9, device="meta", dtype=dtype), k=2)


def test_parts_and_samples_are_those_of_the_host(made):
    there, here = from_tensor(csr(made)), read_counts(sp.csr_array(made))
    size = SampleSize(nonzeros=1000, rows=70, counts=1000)
    few, same = sample_documents(there, 3, size=size), sample_documents(here, 3, size=size)
    for found, wanted in (
        (there.part(20, 60).block(0, 40), here.block(20, 60)),
        (few.block(0, few.documents), same.block(0, same.documents)),
    ):
        assert isinstance(found.values, Csr)
        for a, b in zip(found.parts, wanted.parts, strict=True):
            assert_array_equal(a, b)
    assert there.stored_bytes > 0
    assert_array_equal(there.weights(), here.weights())


@pytest.mark.parametrize("sparse", [False, True])
def test_what_has_no_room_for_its_copy_is_worked_on_in_turn(made, monkeypatch, sparse):
    """Sparse counts are sorted, which takes four times their memory."""
    there = from_tensor(csr(made) if sparse else torch.tensor(made))
    whole, one = build_problem(there), pt.fit(there, k=3)
    free = 4 * there.stored_bytes - 1 if sparse else 256 * 100
    monkeypatch.setattr("paceline.workloads.topics.fitting.tiers.get_free_device_bytes", lambda device: free)
    parts = build_problem(there)
    assert len(list(whole.documents())) == 1
    assert len(list(parts.documents())) > 1
    assert pt.fit(there, k=3).loss == pytest.approx(one.loss, rel=1e-6)


def test_whole_tiles():
    for shape in ((3, 8), (256, 300), (5, 7), (256, 512)):
        X = torch.randint(0, 200, shape, dtype=torch.uint8)
        padded = pad_to_tiles(X)
        assert all(size % 256 == 0 for size in padded.shape)
        assert torch.equal(padded[: shape[0], : shape[1]], X)
        assert padded.sum() == X.sum()
