"""What a run folder keeps so that its model can be used later, without the data and the cache it was trained on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config.registry import get_user_module
from paceline.errors import RunFailed
from paceline.io.files import hash_file, sync_folder, write_atomic, write_sealed
from paceline.runlog.run_dir import KEPT_SUMS, RunDir
from paceline.workload import BaseWorkload, Workload

SOURCE = "source"
"""A folder in it: the user's own file as it was when the run began, to be read."""


def save_inference_assets(run: RunDir, workload: BaseWorkload) -> None:
    """Write RUN/kept in one go, unless it is there: a run that is resumed has it already."""
    if run.kept.is_dir() or not isinstance(workload, Workload):
        return
    aside = run.path / f".kept.{os.getpid()}"
    try:
        with _writing(run.kept):
            aside.mkdir()
        workload.keep(aside)
        with _writing(run.kept):
            if (own := find_user_file(workload.spec.workload)) is not None:
                (aside / SOURCE).mkdir()
                write_atomic(aside / SOURCE / own.name, own.read_bytes())
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            write_sealed(aside / KEPT_SUMS, {str(file.relative_to(aside)): hash_file(file) for file in files})
            sync_folder(aside)
            aside.rename(run.kept)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What fails here is the disk; what fails in `Workload.keep` may be the user's own code."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"cannot write {folder}: {error.strerror}") from error


def find_user_file(workload: str) -> Path | None:
    """The file of `file.py:Class`, or the script."""
    place = get_user_module(workload)
    return Path(place) if place.endswith(".py") else None
