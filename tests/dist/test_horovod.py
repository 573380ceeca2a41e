"""Horovod's names on several ranks: collectives, gradients, the optimiser, elastic."""

import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from hvd_work import collectives, differences, elastic_run, example, gradients, optimizer_states

import paceline.horovod as hvd
from paceline.errors import RunFailed, UserError
from paceline.launch.local import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")
MOVING = Path(__file__).parents[2] / "docs" / "examples" / "moving"
BEFORE, AFTER = (MOVING / f"horovod_{word}.py" for word in ("before", "after"))


def same(got, expected):
    if isinstance(expected, torch.Tensor):
        return got.dtype == expected.dtype and torch.equal(got, expected)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    return got == expected


def test_collectives_answer_as_horovod_does():
    base = torch.arange(6.0).reshape(3, 2)
    rows = torch.tensor([[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]])
    expected = {
        "average": base + 1,
        "average of whole numbers": torch.tensor([3, -7]),
        "sum": 3 * base + 3,
        "min": base,
        "product": torch.tensor(6.0),
        "scaled": 6 * base + 6,
        "small type": torch.tensor([3], dtype=torch.int16),
        "in place": 3 * base + 3,
        "under way": base + 2,
        "done": True,
        "grouped": [3 * base + 3, torch.tensor([9, -21])],
        "gathered": rows,
        "gathered numbers": torch.tensor([0, 1, 2]),
        "from one": (base + 2, torch.tensor([1, 1])),
        "objects": ([{"rank": 0}, {"rank": 1}, {"rank": 2}], [1]),
    }
    for rank, found in enumerate(run_ranks(collectives, (), 3)):
        assert {name: found[name] for name, value in expected.items() if not same(found[name], value)} == {}
        assert found["place"] == (rank, 3, rank, 3, 0, 1, True)
        assert found["misfits"][0].startswith("the tensors differ between ranks")
        assert all("rank 1 gives" in message for message in found["misfits"][1:])


def test_gradients_go_through_collectives():
    same = {"sum": [3.0, 3.0], "average": [1.5, 1.5], "gather": [1.5, 1.5]}
    assert run_ranks(gradients, (), 2) == [{**same, "broadcast": [0.0, 0.0]}, {**same, "broadcast": [1.5, 1.5]}]


ROWS = {
    "as it is": {},
    "two passes": {"options": {"backward_passes_per_step": 2}},
    "divided before": {"options": {"gradient_predivide_factor": 2.0}},
    "a sum, in two groups": {"options": {"op": hvd.Sum, "num_groups": 2}},
    "clipped": {"clip": 0.1},
    "by closure": {"closure": True},
    "given up once": {"given up": True},
    "sparse": {"sparse": True},
    "in 16 bits": {"options": {"compression": hvd.Compression.fp16}},
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_optimiser_trains_as_one_process_does(ranks):
    for found in run_ranks(differences, (ROWS,), ranks):
        for name, (far, left_alone) in found.items():
            assert far < (2e-2 if name == "in 16 bits" else 2e-5), name
            assert left_alone, name


def test_after_a_failure_training_resumes_from_the_last_commit(tmp_path, capfd):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    (seen, resets, weight), _ = run_ranks(elastic_run, (str(tmp_path / "whole"),), 2)
    assert [sorted(chain(*seen[epoch : epoch + 4])) for epoch in (0, 4)] == [list(range(16))] * 2
    assert resets == []
    with pytest.raises(RunFailed, match="the power is gone"):
        run_ranks(elastic_run, (str(tmp_path / "broken"), 6), 2)
    assert (tmp_path / "broken" / "elastic-elastic_script.safetensors").exists()
    with pytest.raises(UserError, match="does not fit"):
        run_ranks(elastic_run, (str(tmp_path / "broken"), None, 2), 2)
    ((again, resets, other),) = run_ranks(elastic_run, (str(tmp_path / "broken"),), 1)
    assert again == seen
    assert resets == [1]
    assert other == pytest.approx(weight, rel=1e-5)
    assert not list((tmp_path / "broken").iterdir())
    assert "resuming from elastic-elastic_script.safetensors" in capfd.readouterr().err


def test_the_state_of_an_optimiser_becomes_that_of_the_root():
    first, second = run_ranks(optimizer_states, (), 2)
    assert first == second
    assert first[:3] == (0.1, (0.5, 0.9), 1)


def test_the_example_prints_the_same_losses_before_and_after_and_on_any_number_of_ranks(capfd):
    printed = []
    for file, ranks in ((BEFORE, 1), (BEFORE, 2), (AFTER, 2)):
        run_ranks(example, (str(file),), ranks)
        out, err = capfd.readouterr()
        printed.append([float(text) for text in re.findall(r"epoch \d loss (\S+)", out)])
        assert err.startswith(f"paceline.horovod: {ranks} rank")
        assert len(err.splitlines()) == 1
    assert len(printed[0]) == 3
    assert printed[0][-1] < 0.5 * printed[0][0]
    for losses in printed[1:]:
        assert losses == pytest.approx(printed[0], rel=1e-5)
