"""Addresses such as `s3://bucket/runs`: data are cached by content, run folders are mirrored, through fsspec."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UserError, get_first_line
from paceline.io.files import expand_cache, write_atomic

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)")
LOCAL = ("file", "local")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}
REMOTE_FILE = "remote.json"  # in the mirror of a run folder: its address
MANIFEST = "manifest.json"  # of a checkpoint: sent last, so that half a checkpoint is never taken for one
IDENTITY = ("ETag", "etag", "blob_id", "xet_hash", "md5Hash", "mtime", "LastModified", "last_modified", "size")
CACHE = Path("~/.cache/paceline")


def find_address(path: str | Path) -> str | None:
    """Return the address that a path stands for (a Path has lost its second slash); None for a file of this machine."""
    if (found := ADDRESS.fullmatch(str(path))) is None:
        return None
    return f"{found[1]}:///{found[2]}" if found[1] in LOCAL else f"{found[1]}://{found[2]}"


@contextmanager
def _open_filesystem(address: str, key: str) -> Iterator[tuple[Any, str]]:
    """Yield (file system, path in it) of an address; errors of any file system become UserError."""
    given = f"{key}={address}" if key else address
    scheme = address.partition(":")[0]
    try:
        yield _find_filesystem(address)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{given}: there is no such file or folder", code="not-found", key=key) from None
    except (ImportError, ValueError) as error:
        line = f"  pip install {PACKAGES[scheme]}" if scheme in PACKAGES else f" a filesystem of fsspec for {scheme}://"
        raise UserError(f"{given}: needs{line}  ({error})", code="not-installed", key=key) from None
    except Exception as error:  # of any filesystem
        message = f"{given}: cannot be reached ({get_first_line(error)}); check its name and your credentials"
        raise UserError(message, code="unreadable", key=key) from None


def _find_filesystem(address: str) -> tuple[Any, str]:
    import fsspec

    options = {"auto_mkdir": True} if address.startswith(LOCAL) else {}
    filesystem, root = fsspec.core.url_to_fs(address, **options)
    filesystem.invalidate_cache()
    return filesystem, root


def _list_files(filesystem: Any, root: str) -> dict[str, str]:
    """Return the paths of all files below a folder, by their names in it."""
    return {path[len(root) :].lstrip("/"): path for path in filesystem.find(root)}


def fetch_data(path: Path, key: str = "") -> Path:
    """Return the path itself or, of an address, that of its copy in the cache, named by content."""
    if (address := find_address(path)) is None:
        return path
    with _open_filesystem(address, key) as (filesystem, root):
        pattern = any(sign in root for sign in "*?[")
        found = filesystem.glob(root, detail=True) if pattern else filesystem.find(root, detail=True)
        if not found:
            raise FileNotFoundError(root)
        base = root.rpartition("/")[0] if pattern or list(found) == [root] else root
        files = {name: name[len(base) :].lstrip("/") for name in sorted(found)}
        facts = [[name, *(str(found[name].get(fact)) for fact in IDENTITY)] for name in files]
        name = hashlib.sha256(json.dumps([address, facts]).encode()).hexdigest()[:24]
        folder = expand_cache(CACHE) / "remote" / name
        if not folder.is_dir():
            aside = folder.with_name(f".{name}.{os.getpid()}")
            try:
                for remote, local in files.items():
                    (aside / local).parent.mkdir(parents=True, exist_ok=True)
                    filesystem.get_file(remote, str(aside / local))
                with suppress(OSError):  # another rank was first
                    aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    if pattern:
        return folder / root.rpartition("/")[2]
    return folder / next(iter(files.values())) if base != root else folder


def find_mirror(address: str) -> Path:
    """Return the local folder that mirrors a folder of runs."""
    return expand_cache(CACHE) / "runs" / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]


def fetch_run(path: Path, key: str = "") -> Path:
    """Return the path itself or, of an address, that of the run's mirror, with the checkpoints that only it has."""
    if (address := find_address(path)) is None:
        return path
    parent, _, name = address.rstrip("/").rpartition("/")
    local = find_mirror(parent) / name
    with _open_filesystem(address, key) as (filesystem, root):
        found = _list_files(filesystem, root)
        if "spec.yaml" not in found:
            raise FileNotFoundError(root)
        sealed = {name.rpartition("/")[0] for name in found if name.endswith(f"/{MANIFEST}")}
        for name in sorted(found, key=_sort_manifests_last):
            file = local / name
            if file.exists() or (name.startswith("checkpoints/") and name.rpartition("/")[0] not in sealed):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            aside = file.with_name(f".{file.name}.{os.getpid()}")
            filesystem.get_file(found[name], str(aside))
            aside.rename(file)
    mark_mirror(local, address)
    return local


def fetch_runs(address: str, name: str, whole: bool) -> Path:
    """Return the mirror of a folder of runs, with those called `name` or `name-2`: the first as a `whole`."""
    folder = find_mirror(address)
    folder.mkdir(parents=True, exist_ok=True)
    with _open_filesystem(address, "--out") as (filesystem, root):
        for remote in filesystem.glob(f"{root}/{name}*/spec.yaml"):
            run = remote.split("/")[-2]
            if run == name and whole:
                fetch_run(Path(f"{address.rstrip('/')}/{run}"))
            elif not (folder / run / "spec.yaml").exists():
                (folder / run).mkdir(parents=True, exist_ok=True)
                filesystem.get_file(remote, str(folder / run / "spec.yaml"))
    return folder


def mark_mirror(run: Path, address: str) -> None:
    write_atomic(run / REMOTE_FILE, json.dumps({"address": address}) + "\n")


def _sort_manifests_last(name: str) -> tuple[bool, str]:
    return name.endswith(MANIFEST), name


def upload_run(run: Path) -> None:
    """Send what is new in the mirror of a run: manifests of checkpoints last, and remove what was removed here."""
    try:
        address = json.loads((run / REMOTE_FILE).read_text(encoding="utf-8"))["address"]
    except FileNotFoundError:
        return
    try:
        filesystem, root = _find_filesystem(address)
        there: dict[str, str] = {}
        with suppress(FileNotFoundError):
            there = _list_files(filesystem, root)
        here = [file.relative_to(run) for file in run.rglob("*") if file.is_file() and not file.is_symlink()]
        names = {str(file) for file in here if not any(part[0] == "." for part in file.parts[:-1])}
        own = [name for name in names if not name.startswith(("heartbeats/", ".")) and name != REMOTE_FILE]
        manifests = [name for name in own if name.endswith(f"/{MANIFEST}") and name in there]
        same = [name for name in manifests if filesystem.cat_file(there[name]) == (run / name).read_bytes()]
        sent = {name.rpartition("/")[0] for name in same}
        changed = [name for name in own if name.rpartition("/")[0] not in sent]
        for name in sorted(changed, key=_sort_manifests_last):
            filesystem.put_file(str(run / name), f"{root}/{name}")
        gone = [name for name in there if name.startswith("checkpoints/") and name not in names]
        for name in sorted(gone, key=_sort_manifests_last, reverse=True):
            filesystem.rm_file(there[name])
    except Exception as error:
        message = f"{run} could not be sent to {address} ({get_first_line(error)}); it is whole here:  "
        raise RunFailed(f"{message}paceline train --resume {run}", code="not-writable") from None
