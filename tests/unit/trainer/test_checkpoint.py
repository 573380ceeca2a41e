"""Checkpoints of one process: what is saved comes back, what is damaged is skipped, a kill loses nothing."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import RunFailed, UserError
from paceline.io.files import hash_file, hash_value
from paceline.trainer.checkpoint import reader, staging
from paceline.trainer.checkpoint.reader import MANIFEST, Checkpoint, read_tensors, restore_checkpoint
from paceline.trainer.checkpoint.writer import CheckpointWriter


def state_of(step: int, n: int = 6) -> dict[str, Any]:
    return {"model": {"a.weight": torch.full((n, 4), float(step))}, "optim": {"a": {"step": torch.tensor(float(step))}}}


def save(folder: Path, *steps: int, keep: int = 9, scores: dict[int, float] | None = None) -> None:
    checkpoints = CheckpointWriter(folder, keep)
    for step in steps:
        checkpoints.save(state_of(step), {"step": step}, score=(scores or {}).get(step))
    checkpoints.close()


def save_state(folder: Path, state: dict[str, Any], meta: dict[str, Any], **how: Any) -> None:
    checkpoints = CheckpointWriter(folder, 2)
    checkpoints.save(state, meta, **how)
    checkpoints.close()


def found(folder: Path) -> tuple[Checkpoint, list[str]]:
    said: list[str] = []
    return reader.find_newest(folder, said.append), said


def newest(folder: Path) -> Checkpoint:
    checkpoint, said = found(folder)
    assert not said
    return checkpoint


def assert_rejected(code: str, key: str, work: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as rejected:
        work()
    assert (rejected.value.code, rejected.value.key) == (code, key)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    model = {f"t{i}": torch.randint(0, 2, (3, 5)).to(dtype) for i, dtype in enumerate(dtypes)}
    model["conv"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    model["slice"] = torch.randn(10, 10)[::2, 1:3].T
    model["scalar"] = torch.tensor(3.5)
    model["empty"] = torch.empty(0, 7)
    state = {"model": model, "optim": {0: {"m": torch.randn(4, requires_grad=True)}}, "scaler": {}}
    meta = {"step": 7, "loss": 0.25, "name": "é", "nested": {"a": [1, None]}}
    save_state(tmp_path / "runs" / "checkpoints", state, meta, score=0.5)
    checkpoint = newest(tmp_path / "runs" / "checkpoints")
    assert checkpoint == Checkpoint(tmp_path / "runs" / "checkpoints" / "step-00000007", 7, meta, 0.5)
    zeros = {name: torch.zeros_like(t) for name, t in model.items()}
    fresh = {"model": zeros, "optim": {0: {"m": torch.zeros(4, requires_grad=True)}}, "scaler": {}}
    restore_checkpoint(checkpoint, fresh)
    flat, expected = staging.flatten_state(fresh), staging.flatten_state(state)
    assert flat.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(flat[name], tensor), name
    assert flat["optim.0.m"].requires_grad
    read = read_tensors(checkpoint)
    assert read.keys() == model.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in model.items())
    assert list(read_tensors(checkpoint, "optim.")) == ["0.m"]
    assert read_tensors(checkpoint, "none.") == {}


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"embed": torch.ones(4, 2)}, "model.embed"),
        ({"embed": torch.ones(8, 2).bfloat16()}, "model.embed"),
        ({"embed": torch.ones(8, 2), "more": torch.ones(1)}, "model.more"),
        ({}, "model.embed"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: dict[str, Tensor], key: str) -> None:
    save_state(tmp_path, {"model": {"embed": torch.ones(8, 2), "bias": torch.ones(2)}}, {"step": 1})
    checkpoint = newest(tmp_path)
    bias = torch.zeros(2)
    assert_rejected("conflict", key, lambda: restore_checkpoint(checkpoint, {"model": {"bias": bias, **model}}))
    assert (bias == 0).all(), "nothing may be loaded before everything fits"


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, scores={1: 0.1, 2: 0.9, 3: 0.2, 4: float("nan")})
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    checkpoint = reader.find_best(tmp_path, pytest.fail)
    assert (checkpoint.step, checkpoint.score) == (2, 0.9)


def test_best_skips_damaged_ones_and_falls_back_to_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, scores={1: 0.1, 2: 0.9, 3: 0.1})
    said: list[str] = []
    expected = [2, 3, 1, 4]  # the best, the newer of equals, the other, those without a score
    for step in expected:
        checkpoint = reader.find_best(tmp_path, said.append)
        assert checkpoint.step == step
        flip(checkpoint.path / "__0_0.distcp")
    assert reader.find_best(tmp_path, said.append) is None
    assert len(said) == 1 + 2 + 3 + 4


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep=3)
    flip(tmp_path / "step-00000003" / "__0_0.distcp")
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_the_one_just_sealed_is_kept_even_if_later_steps_exist(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000005", "step-00000020"]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_manifest(folder: Path, **changes: Any) -> None:
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def reseal(folder: Path) -> None:
    """Make the checksums agree with the files, as someone who means harm would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["seal"]
    manifest["files"] = {n: [(folder / n).stat().st_size, hash_file(folder / n)] for n in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"seal": hash_value(manifest)}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (lambda p: flip(p / "__0_0.distcp"), "__0_0.distcp is damaged (it differs from its checksum)"),
    "truncated": (lambda p: os.truncate(p / "__0_0.distcp", 100), "__0_0.distcp has 100 bytes instead of"),
    "missing file": (lambda p: (p / "__0_0.distcp").unlink(), "its file __0_0.distcp is missing"),
    "missing manifest": (lambda p: (p / MANIFEST).unlink(), "it has no manifest.json"),
    "not a manifest": (lambda p: (p / MANIFEST).write_text("[]"), "manifest.json cannot be read"),
    "changed manifest": (lambda p: change_manifest(p, score=1.0), "manifest.json is damaged"),
    "future format": (lambda p: change_manifest(p, format=2), "it is of format 2"),
    "renamed folder": (lambda p: shutil.copytree(p.with_name("step-00000001"), p, dirs_exist_ok=True), "is of step 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, damage: str) -> None:
    do, reason = DAMAGES[damage]
    save(tmp_path, 1, 2, 3)
    do(tmp_path / "step-00000003")
    checkpoint, said = found(tmp_path)
    assert checkpoint.step == 2
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {tmp_path / 'step-00000003'} is skipped: ")
    assert reason in said[0]


class Harm:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def trick_metadata(metadata: Any, folder: Path) -> Any:
    return Harm(folder.parents[1] / "harm")


def trick_bytes(metadata: Any, folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata["model.a.weight"] = BytesStorageMetadata()  # DCP would unpickle it unrestricted
    return metadata


def trick_shard(metadata: Any, folder: Path) -> Any:
    torch.save(Harm(folder.parents[1] / "harm"), folder / "__0_0.distcp")
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (folder / "__0_0.distcp").stat().st_size
    return metadata


def trick_outside(metadata: Any, folder: Path) -> Any:
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    return metadata


@pytest.mark.parametrize("trick", [trick_metadata, trick_bytes, trick_shard, trick_outside, lambda *_: [1], None])
def test_a_checkpoint_that_would_run_or_read_something_else_is_refused(tmp_path: Path, trick: Any) -> None:
    save(tmp_path / "c", 1)
    folder = tmp_path / "c" / "step-00000001"
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    content = b"\x80\x04rubbish" if trick is None else pickle.dumps(trick(metadata, folder))
    (folder / ".metadata").write_bytes(content)
    reseal(folder)
    checkpoint = newest(folder.parent)
    assert checkpoint.path == folder
    assert_rejected("not-trusted", "", lambda: restore_checkpoint(checkpoint, state_of(0)))
    assert_rejected("not-trusted", "", lambda: read_tensors(checkpoint))
    assert not (tmp_path / "harm").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mount.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_said_and_nothing_is_lost(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    save(folder, 1)
    checkpoints = CheckpointWriter(folder, 2)
    large = state_of(2, n=300_000)
    before = large["model"]["a.weight"].clone()
    checkpoints.save(large, {"step": 2})
    with pytest.raises(RunFailed) as failed:
        checkpoints.wait()
    assert failed.value.code == "disk-full"
    assert "it needs 4.8 MB" in str(failed.value)
    checkpoints.wait()  # said once
    assert torch.equal(large["model"]["a.weight"], before)
    assert names(folder) == ["step-00000001"]
    checkpoints.save(state_of(5), {"step": 5})
    checkpoints.close()
    assert names(folder) == ["step-00000001", "step-00000005"]


def test_a_folder_that_cannot_be_written(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder, reason in ((small_disk, "read-only file system"), (tmp_path, "not a directory")):
        with pytest.raises(RunFailed, match=reason):
            save_state(folder / "checkpoints", state_of(1), {"step": 1})


def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    """Before each change of the folder; in a process of its own, which forks the writers: this file as a program."""
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kills") == 1


def kill_before_each_change(folder: Path) -> None:
    """A step is saved again and another one after it, with a kill before every file made, renamed or removed."""
    kills = 0
    while True:
        place = folder / str(kills)
        save(place, 1, 2)
        writer = os.fork()
        if writer == 0:
            sys.addaudithook(killer(place, kills))
            save(place, 2, 3, keep=1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
        assert code in (0, -signal.SIGKILL)
        checkpoint, said = found(place)
        assert checkpoint.step >= 2
        assert all(text.endswith("it was not finished") for text in said), said
        assert (read_tensors(checkpoint)["a.weight"] == checkpoint.step).all()
        save(place, 4, keep=1)
        assert names(place) == ["step-00000004"]
        if code == 0:
            break
        kills += 1
    assert kills > 20
    print(f"{kills} kills")


def killer(place: Path, after: int) -> Callable[[str, tuple[Any, ...]], None]:
    changes = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal changes
        written = event == "open" and str(place) in str(args[0]) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if written or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            if changes == after:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    return hook


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_before_each_change(Path(sys.argv[1]))
