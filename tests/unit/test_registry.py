"""The table of workloads: what it says of each is what the run class says of itself."""

import pytest

from paceline.config.registry import BUILT_IN, find_entry, list_workload_verbs
from paceline.data.samples import load_training_samples, traits_of
from paceline.workload import build_workload


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_entry_says_what_its_run_class_says(name):
    entry = find_entry(name)
    kind = entry.run_class()
    assert entry.batched == kind.batched
    assert entry.sections() == {"model": kind.Model, "data": kind.Data}


@pytest.mark.parametrize("fixture", ["small", "tiny_lm"])
def test_the_planner_expects_the_traits_that_the_runtime_finds(fixture, request):
    spec = request.getfixturevalue(fixture)
    workload = build_workload(spec)
    workload.prepare(lambda text: None)
    assert traits_of(workload, load_training_samples(workload)) == find_entry(spec.workload).traits


def test_workloads_add_their_own_commands():
    assert {"topics", "sample"} <= set(list_workload_verbs())
