"""Write the checkpoints of a run: aside, sealed with checksums, renamed.

    checkpoints/.step-00000300.writing/   being written, or left behind by a killed run
    checkpoints/step-00000200/            sealed: __0_0.distcp …  .metadata, or state.safetensors;  manifest.json
    checkpoints/step-00000200.old/        only while one of the same step takes its place
    checkpoints/.step-00000100.deleting/  no longer kept

A kill at any moment leaves the checkpoints before it whole. What fails on one rank fails on all.
"""

import errno
import json
import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from paceline.errors import Code, RunFailed, get_first_line
from paceline.hardware.catalogue import match_driver_name
from paceline.hardware.failures import describe_interval, find_best_interval_s, resolve_failures
from paceline.io.files import hash_file, hash_value, sync_file, sync_folder
from paceline.io.remote import upload_run
from paceline.launch.process_group import broadcast_from_main, create_subgroup, gather_objects
from paceline.trainer.checkpoint import reader, staging

T = TypeVar("T")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
FIRST_STEPS = 20  # of `auto`: the first checkpoint shows what one costs
LARGEST_CHANGE = 1.5  # of an interval that is announced again


class CheckpointWriter:
    """The checkpoints of one run: written aside, sealed with checksums, renamed."""

    def __init__(self, folder: Path, keep: int, one_file: bool = False) -> None:
        """Keep the newest `keep` and the best by score; `one_file` holds the tensors of all ranks."""
        assert keep > 0
        self._folder, self._keep, self._one_file = folder, keep, one_file
        with suppress(OSError):  # a save reports it
            folder.parent.mkdir(parents=True, exist_ok=True)
        # Never the training group: its collectives run in the main thread at the same time.
        together = dist.is_available() and dist.is_initialized()
        self._group = create_subgroup(backend="gloo") if together else None
        self._rank: int = dist.get_rank() if together else 0
        self._ranks: int = dist.get_world_size() if together else 1
        self._staging = staging.Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        self._proven: set[Path] = set()  # their checksums were computed by this process

    def save(self, state: Mapping[str, Any], meta: Mapping[str, Any], *, score: float | None = None) -> None:
        """Copy the tensors and return; they are written while training continues."""
        self.wait()
        score = float(score) if score is not None and math.isfinite(score) else None
        manifest = {"format": reader.CHECKPOINT_FORMAT, "step": int(meta["step"]), "meta": dict(meta), "score": score}
        manifest = json.loads(json.dumps(manifest))
        flat = staging.flatten_state(state)
        try:
            mine = staging.select_own_tensors(flat, self._group)
        except RuntimeError as error:
            raise RunFailed(_describe_lost_rank(manifest["step"], error)) from error
        self._staging.copy({name: flat[name] for name in mine}, self._ranks)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._in_flight = self._thread.submit(self._write, manifest, device)

    def wait(self) -> None:
        """Wait until the save in flight is sealed; raise RunFailed, on every rank, if it could not be."""
        if self._in_flight is not None:
            try:
                self._in_flight.result()
            finally:
                if self._in_flight.done():
                    self._in_flight = None

    def close(self) -> None:
        """Wait for the save in flight, and release the thread and the process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _write(self, manifest: dict[str, Any], device: int | None) -> None:
        """Write, seal and rename one checkpoint, in the background thread of every rank."""
        if device is not None:
            torch.cuda.set_device(device)
        step = manifest["step"]
        final = self._folder / f"step-{step:08d}"
        writing = self._folder / f".{final.name}.writing"
        bytes_needed = 0
        failure = f"could not be written to {self._folder} (those before it are untouched)"
        try:
            bytes_needed = sum(self._run_on_all(lambda: self._staging.bytes_share))
            self._run_on_main(lambda: self._make_writing_folder(writing))
            files: dict[str, Any] = {}
            for written in self._run_on_all(lambda: self._write_rank_files(writing)):
                files |= written
            if self._one_file:
                files = self._run_on_main(lambda: _join_files(writing, files, step))
            self._run_on_main(lambda: self._seal_and_rename(writing, final, manifest | {"files": files}))
            failure = f"is sealed in {self._folder}, but not at its address"
            self._run_on_main(lambda: upload_run(self._folder.parent))
            failure = f"is sealed, but an older one could not be removed from {self._folder}"
            self._run_on_main(lambda: self._discard_old(final))
        except (_RankFailure, RuntimeError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            bytes_free = shutil.disk_usage(next(path for path in writing.absolute().parents if path.is_dir())).free
            if not isinstance(error, _RankFailure):  # the others do not answer: there is nobody to agree with
                raise RunFailed(_describe_lost_rank(step, error)) from error
            with suppress(RuntimeError):
                bytes_free = self._run_on_main(lambda: bytes_free)
            code: Code = "disk-full" if error.errno in DISK_FULL else "not-writable"
            reason = f"{failure}: {error.describe(bytes_needed, bytes_free)}"
            raise RunFailed(f"the checkpoint of step {step} {reason}", code=code) from None

    def _make_writing_folder(self, writing: Path) -> None:
        for leftover in [*self._folder.glob(".step-*.writing"), *self._folder.glob(".step-*.deleting")]:
            shutil.rmtree(leftover)
        with suppress(FileExistsError):
            self._folder.mkdir()
        writing.mkdir()

    def _write_rank_files(self, writing: Path) -> dict[str, Any]:
        """Write this rank's DCP files; return their sizes and checksums by name."""
        from paceline.trainer.checkpoint import dcp_files

        dcp_files.write_dcp(self._staging, writing, self._group)
        own = sorted(writing.glob(f"__{self._rank}_*.distcp")) + [writing / dcp_files.METADATA] * (self._rank == 0)
        return _describe_files(*own)

    def _seal_and_rename(self, writing: Path, final: Path, manifest: dict[str, Any]) -> None:
        _check_visible(writing, manifest["files"])
        with (writing / reader.MANIFEST).open("w", encoding="utf-8") as stream:
            json.dump(manifest | {"seal": hash_value(manifest)}, stream, indent=1)
            sync_file(stream)
        sync_folder(writing)
        if final.exists():
            aside = final.with_name(f"{final.name}.old")
            if aside.exists():
                _delete_checkpoint(aside)
            final.rename(aside)
        writing.rename(final)
        sync_folder(self._folder)
        self._proven.add(final)

    def _discard_old(self, sealed: Path) -> None:
        """Delete all but `sealed`, the newest `keep` and the best checkpoint; damaged ones do not count and stay."""
        whole: list[reader.Checkpoint] = []
        replaced: list[Path] = []
        for path in reader.list_sealed(self._folder):
            if whole and whole[-1].step == reader.parse_step(path):
                replaced.append(path)
                continue
            with suppress(reader.DamagedCheckpoint):
                whole.append(reader.verify_checkpoint(path, checksums=path not in self._proven))
                self._proven.add(path)
        scores = {checkpoint.path: checkpoint.score for checkpoint in whole if checkpoint.score is not None}
        best = [max(scores, key=scores.__getitem__)] if scores else []
        kept = {sealed, *best, *(checkpoint.path for checkpoint in whole[: self._keep])}
        for path in [*replaced, *(checkpoint.path for checkpoint in whole)]:
            if path not in kept:
                self._proven.discard(path)
                _delete_checkpoint(path)

    def _run_on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on all ranks; raise its failure on all ranks."""
        return self._run_on_all(lambda: work() if self._rank == 0 else None)[0]  # type: ignore[return-value]

    def _run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the results by rank; raise a failure of one rank on all ranks."""
        from paceline.trainer.checkpoint.dcp_files import CheckpointException

        mine: T | _RankFailure
        try:
            mine = work()
        except (Exception, CheckpointException) as error:
            rank, cause = self._rank, cast(BaseException, error)
            if isinstance(error, CheckpointException):
                rank, cause = reader.find_first_failure(error)
            mine = _RankFailure(rank, reader.describe_failure_cause(cause), getattr(cause, "errno", None))
        everyone: list[Any] = [mine] if self._group is None else gather_objects(mine, self._group)
        for result in everyone:
            if isinstance(result, _RankFailure):
                raise result
        return everyone


class _RankFailure(Exception):
    """What went wrong on one rank, sent to the others."""

    def __init__(self, rank: int, reason: str, number: int | None) -> None:
        super().__init__(rank, reason, number)
        self.rank, self.reason, self.errno = rank, reason, number

    def describe(self, bytes_needed: int, bytes_free: int) -> str:
        """Return the reason, its rank if not 0 and a remedy; an OS error adds the whole checkpoint's size."""
        text = self.reason if self.rank == 0 else f"{self.reason} (rank {self.rank})"
        if self.errno is not None:
            text += f"; it needs {bytes_needed / 1e6:,.1f} MB and {bytes_free / 1e6:,.1f} MB are free"
        if self.errno in DISK_FULL:
            text += "; make room there, then resume the run"
        elif self.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text += "; make the folder writable, then resume the run"
        return text


def _join_files(writing: Path, files: Mapping[str, Any], step: int) -> dict[str, Any]:
    from paceline.trainer.checkpoint import dcp_files

    _check_visible(writing, files)
    return _describe_files(dcp_files.join_dcp(writing, step))


def _check_visible(writing: Path, files: Mapping[str, Any]) -> None:
    for name, (size, _) in files.items():
        file = writing / name
        if not file.exists() or file.stat().st_size != size:
            raise RunFailed(f"{name} was written but is not seen by rank 0: all ranks must share this folder")


def _describe_files(*files: Path) -> dict[str, Any]:
    return {file.name: [file.stat().st_size, hash_file(file)] for file in files}


def _describe_lost_rank(step: int, error: BaseException) -> str:
    reason = get_first_line(error)
    return f"the checkpoint of step {step} was not finished: another rank ended or cannot be reached ({reason})"


def _delete_checkpoint(path: Path) -> None:
    """Rename and delete a checkpoint, so that a half-deleted one is never mistaken for a damaged one."""
    doomed = path.with_name(f".{path.name}.deleting")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def is_due(step: int, every: int, epoch_end: bool) -> bool:
    return step % every == 0 if every else epoch_end


class CheckpointInterval:
    """A number of steps, each epoch (0), or what loses least to failures, as measured (auto)."""

    def __init__(self, every: int | Literal["auto"], device: torch.device, ranks: int) -> None:
        self.every, self.ranks = every, ranks
        self._device = device
        self._announced = 0
        self._next: int | None = None  # of auto

    def is_due(self, step: int, epoch_end: bool) -> bool:
        if self.every != "auto":
            return is_due(step, self.every, epoch_end)
        if self._next is None:
            self._wait(step - 1, FIRST_STEPS)
        return step == self._next

    def adapt(self, step: int, save_s: float) -> str:
        """Set the next step of `auto` from the time of this save, on all ranks; return a notice of a large change."""
        if self.every != "auto" or self._next is None:
            return ""
        step_s = (perf_counter() - self._began - save_s) / max(1, step - self._first)
        kind = match_driver_name(torch.cuda.get_device_name(self._device)) if self._device.type == "cuda" else None
        failures = resolve_failures(kind)
        steps, step_s, save_s = broadcast_from_main(
            lambda: (round(find_best_interval_s(save_s, failures.rate(self.ranks)) / step_s), step_s, save_s)
        )
        steps = max(1, steps)
        self._wait(step, steps)
        if self._announced and 1 / LARGEST_CHANGE < steps / self._announced < LARGEST_CHANGE:
            return ""
        self._announced = steps
        return f"a checkpoint each {describe_interval(steps, save_s, failures.mtbf_h, self.ranks, step_s)}"

    def _wait(self, step: int, steps: int) -> None:
        self._first, self._next, self._began = step, step + steps, perf_counter()
