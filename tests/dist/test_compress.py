"""Modes that send less: what they compute, that they go on after a kill, and that the run says what they are."""

import shutil

import pytest
import torch
from compressing import on_ranks

from paceline import resume, train
from paceline.errors import UserError
from paceline.launch.local import run_ranks
from paceline.runlog.run_dir import RunDir
from paceline.trials.check import compute_relative_difference
from results import assert_same_bits, losses, tensors_of

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.fixture(scope="module")
def spec(small):
    """24 samples per step divide among 2 and 4 ranks, and 8 steps stay within an epoch of 203."""
    length = {"train.steps": 8, "train.evaluate_every": 8, "train.checkpoint_every": 8}
    return small.replace({**length, "parallel.ranks": 2})


@pytest.fixture(scope="module")
def exact(spec, tmp_path_factory):
    return train(spec, tmp_path_factory.mktemp("exact"), show=False)


def test_powersgd_is_torchs_rounded_sums_do_not_overflow_and_joined_models_are_one():
    run_ranks(on_ranks, (), 4)


@pytest.mark.parametrize("mode", ["bf16", "fp16", "powersgd"])
def test_compressed_gradients_follow_the_exact_ones(spec, exact, tmp_path, mode):
    result = train(spec.replace({"parallel.reduce": mode}), tmp_path, show=False)
    differences = [compute_relative_difference(a, b) for a, b in zip(losses(exact), losses(result), strict=True)]
    assert differences[0] < 1e-6, "the first loss is computed before anything was sent"
    assert 0 < max(differences) < {"bf16": 5e-3, "fp16": 5e-3, "powersgd": 5e-2}[mode]
    assert result.summary.loss_last < result.summary.loss_first
    assert result.summary.differs_from["reduce"] == mode
    assert exact.summary.differs_from is None
    if mode == "powersgd":
        in_many_buckets = spec.replace({"parallel.reduce": mode, "parallel.bucket_mb": 0.01})
        assert losses(train(in_many_buckets, tmp_path, show=False)) == losses(result)


def test_linear_updates_joined_after_every_step_are_exact(spec, tmp_path):
    """The mean of models after SGD is SGD with the mean of gradients, as long as nothing is cut."""
    linear = {"train.optimizer": "sgd", "train.lr": 0.05, "train.clip": 0.0, "train.precision": "fp64"}
    joined = {"parallel.reduce": "local_sgd", "train.evaluate_every": 1, "parallel.ranks": 4}
    one = train(spec.replace(linear | {"parallel.ranks": 1}), tmp_path / "one", show=False)
    many = train(spec.replace(linear | joined), tmp_path / "many", show=False)
    assert max(compute_relative_difference(a, b) for a, b in zip(losses(one), losses(many), strict=True)) < 1e-10
    for name, tensor in one.weights().items():
        assert torch.allclose(tensor, many.weights()[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(("mode", "others"), [("powersgd", 1), ("local_sgd", None), ("diloco", 3)])
def test_a_killed_run_goes_on_to_the_same_bits(small, tmp_path, mode, others):
    """The checkpoint of step 5 is not where ranks would be joined anyway, and some of the steps are of odd size.

    Another number of ranks can go on as well; 1 rank keeps what it does not need, for those that follow.
    """
    changes = {"train.checkpoint_every": 5, "train.keep": 9, "parallel.ranks": 2, "parallel.reduce": mode}
    left_alone = train(small.replace(changes | {"parallel.local_steps": 4}), tmp_path / "runs", show=False)
    assert left_alone.summary.loss_last < left_alone.summary.loss_first
    result = resume(killed_after_5(left_alone, tmp_path / "killed"), show=False)
    ours = tensors_of(left_alone)
    own = {"powersgd": "powersgd.kept", "local_sgd": "optim", "diloco": "outer.velocity"}[mode]
    assert any(name.startswith(own) for name in ours)
    assert_same_bits(ours, tensors_of(result))
    assert losses(left_alone) == losses(result)
    if others:
        result = resume(killed_after_5(left_alone, tmp_path / "others"), [f"parallel.ranks={others}"], show=False)
        assert result.status == "finished"
        assert tensors_of(result).keys() == ours.keys()


def killed_after_5(result, folder):
    shutil.copytree(result.path, folder)
    for sealed in RunDir(folder).checkpoints.iterdir():
        if sealed.name != "step-00000005":
            shutil.rmtree(sealed)
    return folder


def test_a_run_keeps_its_way(exact):
    with pytest.raises(UserError, match=r"parallel\.reduce=exact"):
        resume(exact.path, ["parallel.reduce=bf16"], show=False)
