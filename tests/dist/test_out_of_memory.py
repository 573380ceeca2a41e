"""A run without memory: the message says what would help, and `train.on_oom=retry` does it, with the same answer."""

from pathlib import Path

import hungry
import pytest

import paceline
from paceline.errors import OutOfMemory
from paceline.runlog.run_dir import RunDir
from results import losses

pytestmark = pytest.mark.usefixtures("warm_ranks")
SPEC = {"workload": f"{Path(hungry.__file__)}:Hungry", "train.steps": 3, "model.layers": 1}


@pytest.fixture(scope="module")
def full(small, tmp_path_factory):
    return losses(paceline.train(small.replace({**SPEC, "workload": "classifier"}), tmp_path_factory.mktemp("a")))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 6), (2, 6)])
def test_smaller_passes_have_the_same_answer(small, ranks, micro_batch, full, tmp_path, capfd):
    result = paceline.train(small.replace({**SPEC, "train.on_oom": "retry", "parallel.ranks": ranks}), tmp_path)
    assert result.status == "finished"
    assert losses(result) == pytest.approx(full, rel=1e-5)
    assert f"parallel.micro_batch={micro_batch} (train.on_oom=retry)" in capfd.readouterr().out
    assert RunDir(result.path).spec().parallel.micro_batch == micro_batch, "and so it goes on if it is resumed"


def test_under_a_launcher_who_starts_the_ranks_again_goes_on_in_smaller_passes(small, full, tmp_path, monkeypatch):
    """As requeued jobs and restarted pods do."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    spec = small.replace({**SPEC, "train.on_oom": "retry"})
    for micro_batch in (12, 6):
        with pytest.raises(OutOfMemory, match=f"micro_batch={micro_batch} "):
            paceline.train(spec, tmp_path, resume_or_start=True)
    result = paceline.train(spec, tmp_path, resume_or_start=True)
    assert (result.status, RunDir(result.path).spec().parallel.micro_batch) == ("finished", 6)
    assert losses(result) == pytest.approx(full, rel=1e-5)


def test_without_it_the_message_says_what_takes_less_and_what_that_costs(small, tmp_path):
    with pytest.raises(OutOfMemory) as caught:
        paceline.train(small.replace(SPEC), tmp_path)
    first, plan, *ways = str(caught.value).splitlines()
    assert "there is no memory for" in first
    assert "the plan counts " in plan
    assert any("parallel.micro_batch=12 " in way and "× the time of a step" in way for way in ways)
