"""The table of workloads: what it says of each is what the run class says of itself."""

import pytest

from paceline.data.samples import training_samples, traits_of
from paceline.errors import UserError
from paceline.registry import BUILT_IN, entry_of, names, verbs
from paceline.workload import workload_of


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_entry_says_what_its_run_class_says(name):
    entry = entry_of(name)
    kind = entry.run_class()
    assert entry.batched == kind.batched
    assert entry.sections() == {"model": kind.Model, "data": kind.Data}


@pytest.mark.parametrize("fixture", ["small", "tiny_lm"])
def test_the_planner_expects_the_traits_that_the_runtime_finds(fixture, request):
    spec = request.getfixturevalue(fixture)
    workload = workload_of(spec)
    workload.prepare(lambda text: None)
    assert traits_of(workload, training_samples(workload)) == entry_of(spec.workload).traits


def test_workloads_add_their_own_commands():
    assert set(verbs()) == {verb for name in names() for verb in entry_of(name).verbs} >= {"topics", "sample"}


@pytest.mark.parametrize(("given", "said"), [("clasifier", "did you mean 'classifier'?"), (3, "3 is not a name")])
def test_what_is_not_in_the_table_is_answered_with_what_is(given, said):
    with pytest.raises(UserError, match="use one of classifier, ensemble, keras, lm") as refused:
        entry_of(given)
    assert said in str(refused.value)
