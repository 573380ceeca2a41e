"""What is expected to go wrong, told apart from mistakes of ours; which runs continue in smaller passes."""

import pytest
import torch

from paceline.config import build_spec
from paceline.errors import OutOfMemory, RunFailed
from paceline.launch.root_cause import describe_exit
from paceline.layout import layout_of
from paceline.planner.advice import suggest_memory_savings
from paceline.trainer.failures import halve_micro_batch, translate_failures

SPEC = build_spec({"train": {"steps": 3, "global_batch": 8, "on_oom": "retry"}, "data": {"source": "docstrings"}})

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
    with pytest.raises(RunFailed, match=said), translate_failures(build_spec({})):
        raise error


@pytest.mark.parametrize("error", [ValueError("he tried to allocate 3 rooms"), KeyError("loss")])
def test_a_mistake_of_ours_stays_what_it_is(error):
    with pytest.raises(type(error)), translate_failures(build_spec({})):
        raise error


def test_passes_are_halved_until_there_is_one_sample_left():
    sizes, spec = [], SPEC
    while (spec := halve_micro_batch(spec, layout_of(spec), OutOfMemory("no memory"))) is not None:
        sizes.append(spec.parallel.micro_batch)
    assert sizes == [4, 2, 1]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (SPEC.replace({"train.on_oom": "stop"}), OutOfMemory("no memory")),
        (SPEC, describe_exit(1, -9, 0.0, secondary=False).error),
    ],
    ids=["not asked for", "killed by somebody"],
)
def test_others_stop(spec, error):
    assert halve_micro_batch(spec, layout_of(spec), error) is None


def test_what_cannot_be_priced_has_no_ways_out(tmp_path):
    own = "class Own(Workload):\n    def prepare(self, say):\n        raise MemoryError\n"
    (tmp_path / "own.py").write_text("from paceline import Workload\n" + own)
    assert suggest_memory_savings(build_spec({"workload": f"{tmp_path}/own.py:Own"})) == ""
    assert suggest_memory_savings(build_spec({"workload": "topics", "data": {"path": "counts.npz"}})) == ""
