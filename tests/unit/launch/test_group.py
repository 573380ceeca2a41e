"""What carries messages between ranks."""

import pytest
import torch.distributed as dist

from paceline.errors import UserError
from paceline.launch.group import _carrier


@pytest.mark.parametrize(
    ("backend", "device", "carrier"),
    [
        ("auto", "cpu", "gloo"),
        ("gloo", "cpu", "gloo"),
        ("auto", "cuda", "cpu:gloo,cuda:nccl"),
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("gloo", "cuda", "gloo"),
    ],
)
def test_the_backend_in_torchs_words(backend, device, carrier):
    assert _carrier(backend, device) == carrier


@pytest.mark.parametrize(("backend", "said"), [("nccl", "these ranks have none; use gloo"), ("mpi", "without MPI")])
def test_a_backend_that_cannot_be_is_refused(backend, said):
    if backend == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch has MPI")
    with pytest.raises(UserError, match=said):
        _carrier(backend, "cpu")
