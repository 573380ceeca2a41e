"""What is expected to go wrong, told apart from mistakes of ours."""

import pytest
import torch

from paceline.config import build_spec
from paceline.errors import RunFailed
from paceline.trainer.failures import translate_failures

SPEC = build_spec({"name": "run"})
MEMORY = "there is no memory"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …"), "for 2.50 GiB more"),
        (torch.OutOfMemoryError("in other words"), f"{MEMORY};"),
        (MemoryError(), f"{MEMORY};"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes."), "8000 bytes"),
        (AttributeError("'DistributedDataParallel' object has no attribute 'head'"), "can only be called"),
        (RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float"), "make it float32 in data"),
    ],
)
def test_what_is_expected_fails_the_run(error, said):
    with pytest.raises(RunFailed, match=said), translate_failures(SPEC):
        raise error


@pytest.mark.parametrize("error", [ValueError("he tried to allocate 3 rooms"), KeyError("loss")])
def test_a_mistake_of_ours_stays_what_it_is(error):
    with pytest.raises(type(error)), translate_failures(SPEC):
        raise error
