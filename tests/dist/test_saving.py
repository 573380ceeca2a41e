"""Checkpoints of several ranks: any number of them reads what any other wrote, and all agree on failures."""

import errno
import os
import time

import pytest
import torch
import torch.distributed as dist

from paceline.errors import RunFailed
from paceline.launch.environment import detect_rank
from paceline.launch.local import run_ranks
from paceline.launch.process_group import join_ranks
from paceline.trainer.checkpoint import dcp_files, staging
from paceline.trainer.checkpoint.reader import Checkpoint, find_newest, read_tensors, restore_checkpoint
from paceline.trainer.checkpoint.writer import CheckpointWriter
from results import expect_error

pytestmark = pytest.mark.usefixtures("warm_ranks")
LONG_S = 200.0  # what would be waited for a rank that died if nobody noticed


def join_and(work, args):
    with join_ranks(detect_rank(os.environ), "cpu", 1, LONG_S):
        work(*args)


def on_ranks(world, work, *args):
    run_ranks(join_and, (work, args), world)


def find(folder):
    return find_newest(folder, pytest.fail)


def save(folder, state, step):
    checkpoints = CheckpointWriter(folder, 2)
    checkpoints.save(state, {"step": step})
    checkpoints.close()


def sample(scale):
    make = torch.Generator().manual_seed(0)
    model = {f"w{i}": scale * torch.randn(100 + i, 30, generator=make) for i in range(7)}
    return {"model": model, "optim": {"step": torch.tensor(3.0 * scale)}}


def read_and_compare(folder):
    state = sample(0.0)
    restore_checkpoint(find(folder), state)
    flat, expected = staging.flatten_state(state), staging.flatten_state(sample(1.0))
    assert not [name for name, tensor in expected.items() if not torch.equal(flat[name], tensor)]
    return state


def reload_and_save(folder, step):
    state = read_and_compare(folder)
    dist.barrier()
    save(folder, state, step)


def test_replicated_tensors_are_written_once_and_read_by_any_number_of_ranks(tmp_path):
    save(tmp_path, sample(1.0), 1)
    sizes = []
    for step, world in enumerate((2, 3), start=2):
        on_ranks(world, reload_and_save, tmp_path, step)
        sizes.append(sum(path.stat().st_size for path in find(tmp_path).path.iterdir()))
        shards = [path.stat().st_size for path in find(tmp_path).path.glob("*.distcp")]
        assert len(shards) == world
        assert max(shards) < 1.5 * sum(shards) / world, shards
    read_and_compare(tmp_path)
    assert max(sizes) < 1.1 * min(sizes), sizes


def train_while_saving(folder):
    """Collectives of different lengths on the training group, never waiting for the checkpoints."""
    checkpoints, weight = CheckpointWriter(folder, 100), torch.zeros(200_000)
    for step in range(1, 151):
        gradient = torch.full((1000 * (1 + step % 7),), float(dist.get_rank()))
        dist.all_reduce(gradient)
        assert (gradient == 1).all()
        weight.fill_(step)
        if step % 10 == 0:
            checkpoints.save({"model": {"w": weight, "b": weight[:3]}}, {"step": step})
    checkpoints.close()


def test_training_goes_on_while_checkpoints_are_written(tmp_path):
    on_ranks(2, train_while_saving, tmp_path)
    steps = sorted(int(path.name.removeprefix("step-")) for path in tmp_path.iterdir())
    assert steps == list(range(10, 151, 10))
    for step in steps[::4]:
        tensors = read_tensors(Checkpoint(tmp_path / f"step-{step:08d}", step, {}, None))
        assert all((tensor == step).all() for tensor in tensors.values())


def see_the_failure_of(rank, folder):
    def fill(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints, healthy = CheckpointWriter(folder, 2), dcp_files._Writer._write_data
    checkpoints.save(sample(1.0), {"step": 1})
    checkpoints.wait()
    if dist.get_rank() == rank:
        dcp_files._Writer._write_data = fill
    checkpoints.save(sample(1.0), {"step": 2})
    with expect_error("disk-full", kind=RunFailed, match=r"\(rank 1\)" if rank else "left on device; "):
        checkpoints.wait()
    checkpoints.save(sample(1.0), {"step": 3})
    with expect_error("disk-full", kind=RunFailed):
        checkpoints.save(sample(1.0), {"step": 4})
    assert os.listdir(folder) == ["step-00000001"]
    dist.barrier()
    dcp_files._Writer._write_data = healthy
    checkpoints.save(sample(1.0), {"step": 5})
    checkpoints.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_rank_is_seen_by_all(tmp_path, rank):
    on_ranks(2, see_the_failure_of, rank, tmp_path)
    assert find(tmp_path).step == 5


def restore_another_model_on_rank_1(folder):
    state = sample(0.0)
    if dist.get_rank() == 1:
        state["model"]["w0"] = torch.zeros(3)
    with expect_error("conflict", "model.w0"):
        restore_checkpoint(find(folder), state)


def write_apart(folder):
    checkpoints = CheckpointWriter(folder / str(dist.get_rank()), 2)
    checkpoints.save(sample(1.0), {"step": 1})
    with pytest.raises(RunFailed, match="not seen by rank 0"):
        checkpoints.close()


def test_other_disagreements_are_seen_by_all(tmp_path):
    save(tmp_path / "shared", sample(1.0), 1)
    on_ranks(2, restore_another_model_on_rank_1, tmp_path / "shared")
    on_ranks(2, write_apart, tmp_path / "apart")
    assert sorted(path.name for path in (tmp_path / "apart").rglob("*")) == ["0", "1"]


def die_while(moment, folder):
    checkpoints = CheckpointWriter(folder, 2)
    checkpoints.save(sample(1.0), {"step": 1})
    checkpoints.wait()
    if dist.get_rank() == 1:
        if moment == "writing":
            dcp_files._Writer._write_data = lambda *args: os._exit(3)
            checkpoints.save(sample(2.0), {"step": 2})
            time.sleep(LONG_S)
        os._exit(3)
    checkpoints.save(sample(2.0), {"step": 2})
    checkpoints.wait()


@pytest.mark.parametrize("moment", ["writing", "training"])
def test_a_rank_that_dies_does_not_hang_the_others(tmp_path, moment):
    began = time.monotonic()
    with pytest.raises(RunFailed, match="rank 1 ended with exit code 3"):
        on_ranks(2, die_while, moment, tmp_path)
    assert time.monotonic() - began < LONG_S / 2
    assert find_newest(tmp_path, lambda text: None).step == 1
