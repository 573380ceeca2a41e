"""Keep in the run folder what using its model needs, without the data and cache it was trained on."""

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


def save_inference_assets(run: RunDir, workload: BaseWorkload) -> None:
    """Write RUN/kept in one rename, unless a resumed run has it already."""
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
    """Turn errors of the disk into RunFailed; `Workload.keep` may be the user's own code."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"cannot write {folder}: {error.strerror}") from error


def find_user_file(workload: str) -> Path | None:
    place = get_user_module(workload)
    return Path(place) if place.endswith(".py") else None
