"""Checkpoints of several processes: any number of ranks reads what any other wrote, and all ranks agree on failures.

Each test runs this file as a program, which imports torch once and forks the ranks of its stories.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import RunFailed, UserError
from paceline.trainer.checkpoint import dcp_files, staging
from paceline.trainer.checkpoint.reader import Checkpoint, find_newest, read_tensors, restore_checkpoint
from paceline.trainer.checkpoint.writer import CheckpointWriter

LONG_S = 200.0  # what would be waited for a rank that died if nobody noticed
STORIES: dict[str, Callable[[Path], None]] = {}


def story(tell: Callable[[Path], None]) -> Callable[[Path], None]:
    STORIES[tell.__name__] = tell
    return tell


def ranks(world: int, work: Callable[..., None], *args: Any, dies: tuple[int, ...] = ()) -> None:
    """Fork `world` ranks of a gloo group, run `work` on each, and expect all but those named to end well."""
    rendezvous = Path(os.environ["TMPDIR"]) / f"rendezvous{time.monotonic_ns()}"
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
                work(*args)
                dist.destroy_process_group()
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert all((code != 0) == (rank in dies) for rank, code in enumerate(codes)), codes


def found(folder: Path) -> Checkpoint:
    said: list[str] = []
    checkpoint = find_newest(folder, said.append)
    assert not said
    assert checkpoint is not None
    return checkpoint


def save(folder: Path, state: dict[str, Any], step: int) -> None:
    checkpoints = CheckpointWriter(folder, 2)
    checkpoints.save(state, {"step": step})
    checkpoints.close()


def sample(scale: float) -> dict[str, Any]:
    make = torch.Generator().manual_seed(0)
    model = {f"w{i}": scale * torch.randn(100 + i, 30, generator=make) for i in range(7)}
    return {"model": model, "optim": {"step": torch.tensor(3.0 * scale)}}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    flat, expected = staging.flatten_state(one), staging.flatten_state(other)
    assert flat.keys() == expected.keys()
    for name, tensor in flat.items():
        assert torch.equal(tensor, expected[name]), name


def reload_and_save(folder: Path, step: int) -> None:
    state = sample(0.0)
    restore_checkpoint(found(folder), state)
    same(state, sample(1.0))
    dist.barrier()
    save(folder, state, step)


@story
def replicated_tensors_are_written_once_and_read_by_any_number_of_ranks(folder: Path) -> None:
    save(folder, sample(1.0), 1)
    sizes = [bytes_of(folder)]
    for step, world in enumerate((2, 3, 1), start=2):
        ranks(world, reload_and_save, folder, step)
        sizes.append(bytes_of(folder))
        shards = [path.stat().st_size for path in found(folder).path.glob("*.distcp")]
        assert len(shards) == world
        assert max(shards) < 1.5 * sum(shards) / world, shards
    state = sample(0.0)
    restore_checkpoint(found(folder), state)
    same(state, sample(1.0))
    assert max(sizes) < 1.1 * min(sizes), sizes


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in found(folder).path.iterdir())


def train_while_saving(folder: Path) -> None:
    """Collectives of different lengths on the training group, never waiting for the checkpoints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    checkpoints = CheckpointWriter(folder, 100)
    weight = torch.zeros(200_000)
    for step in range(1, 151):
        gradient = torch.full((1000 * (1 + step % 7),), float(rank))
        dist.all_reduce(gradient)
        assert (gradient == sum(range(world))).all()
        weight.fill_(step)
        if step % 10 == 0:
            checkpoints.save({"model": {"w": weight, "b": weight[:3]}}, {"step": step})
    checkpoints.close()


@story
def training_goes_on_while_checkpoints_are_written(folder: Path) -> None:
    ranks(2, train_while_saving, folder)
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == [f"step-{step:08d}" for step in range(10, 151, 10)]
    for path in paths[::4]:
        step = int(path.name.removeprefix("step-"))
        tensors = read_tensors(Checkpoint(path, step, {}, None))
        assert all((tensor == step).all() for tensor in tensors.values())


def fail_on(rank: int) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == rank:
        dcp_files._Writer._write_data = full


def see_the_failure_of(rank: int, folder: Path) -> None:
    checkpoints = CheckpointWriter(folder, 2)
    save_and_wait(checkpoints, sample(1.0), 1)
    healthy = dcp_files._Writer._write_data
    said = "no space left on device" + (f" \\(rank {rank}\\)" if rank else "") + "; it needs 0.1 MB"
    fail_on(rank)
    checkpoints.save(sample(1.0), {"step": 2})
    with pytest.raises(RunFailed, match=said):
        checkpoints.wait()
    checkpoints.save(sample(1.0), {"step": 3})
    with pytest.raises(RunFailed, match=said):
        checkpoints.save(sample(1.0), {"step": 4})
    assert os.listdir(folder) == ["step-00000001"]
    dist.barrier()
    dcp_files._Writer._write_data = healthy
    checkpoints.save(sample(1.0), {"step": 5})
    checkpoints.close()


@story
def a_failure_on_one_rank_is_seen_by_all(folder: Path) -> None:
    for rank in (0, 1):
        ranks(2, see_the_failure_of, rank, folder / str(rank))
        assert found(folder / str(rank)).step == 5


def restore_another_model_on_rank_1(folder: Path) -> None:
    state = sample(0.0)
    if dist.get_rank() == 1:
        state["model"]["w0"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"model\.w0 .* \[3\]"):
        restore_checkpoint(found(folder), state)


def write_apart(folder: Path) -> None:
    checkpoints = CheckpointWriter(folder / str(dist.get_rank()), 2)
    checkpoints.save(sample(1.0), {"step": 1})
    with pytest.raises(RunFailed, match="not seen by rank 0"):
        checkpoints.close()


@story
def other_disagreements_are_seen_by_all(folder: Path) -> None:
    save(folder / "shared", sample(1.0), 1)
    ranks(2, restore_another_model_on_rank_1, folder / "shared")
    ranks(2, write_apart, folder / "apart")
    assert sorted(path.name for path in (folder / "apart").rglob("*")) == ["0", "1"]


def save_and_wait(checkpoints: CheckpointWriter, state: dict[str, Any], step: int) -> None:
    checkpoints.save(state, {"step": step})
    checkpoints.wait()


def one_rank_dies_while(moment: str, folder: Path) -> None:
    checkpoints = CheckpointWriter(folder, 2)
    save_and_wait(checkpoints, sample(1.0), 1)
    if dist.get_rank() == 1:
        if moment == "writing":
            dcp_files._Writer._write_data = lambda *args: os._exit(3)
            checkpoints.save(sample(2.0), {"step": 2})
            time.sleep(LONG_S)
        os._exit(3)
    began = time.monotonic()
    with pytest.raises(RunFailed, match="step 2 was not finished"):
        save_and_wait(checkpoints, sample(2.0), 2)
    assert time.monotonic() - began < LONG_S / 2
    assert os.listdir(folder) == ["step-00000001"]
    os._exit(0)


@story
def a_rank_that_dies_does_not_hang_the_others(folder: Path) -> None:
    for moment in ("writing", "training"):
        ranks(2, one_rank_dies_while, moment, folder / moment, dies=(1,))
        assert found(folder / moment).step == 1


@pytest.mark.parametrize("stories", [[*STORIES][:2], [*STORIES][2:]], ids=lambda stories: stories[0])
def test_story(tmp_path: Path, stories: list[str]) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # a forked rank cannot use a device that its parent has touched
    command = [sys.executable, __file__, str(tmp_path), *stories]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        print(f"--- {name}", flush=True)
        place = Path(sys.argv[1]) / name
        place.mkdir()
        began = time.monotonic()
        STORIES[name](place)
        print(f"{time.monotonic() - began:.1f} s", flush=True)
