"""Check the software, the limits of a process, and the disks of this machine."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.diagnostics.results import ALL_NODES, CheckContext, CheckResult, Health
from paceline.io.format import number, size
from paceline.launch.network import INFINIBAND
from paceline.runlog.machine import describe_environment

VERSIONS_TOPIC = "versions"
COMPARED_VERSIONS = ("paceline", "python", "torch", "numpy", "tokenizers", "cuda", "nccl", "driver")
DRIVER = Path("/proc/driver/nvidia/version")
PRELOADED = ("LD_PRELOAD", "LD_LIBRARY_PATH")


def collect_versions() -> dict[str, str]:
    """What nodes compare; empty where there is no such thing."""
    import torch

    here = describe_environment()
    found = {name: str(here.get(name) or "") for name in COMPARED_VERSIONS}
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()
    return found | {"cuda": torch.version.cuda or "", "nccl": ".".join(map(str, nccl)), "driver": read_driver_version()}


def read_driver_version() -> str:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def check_software(here: CheckContext) -> Iterator[CheckResult]:
    known = collect_versions()
    yield CheckResult(
        VERSIONS_TOPIC, "software", ", ".join(f"{name} {known[name]}" for name in COMPARED_VERSIONS[:5] if known[name])
    )


def check_cuda(here: CheckContext) -> Iterator[CheckResult]:
    """torch, the driver and NCCL, which all must know each other's CUDA."""
    import torch

    driver, built = read_driver_version(), torch.version.cuda
    if built is None:
        if driver:
            found = f"torch {torch.__version__} is made for CPUs, and this machine has NVIDIA driver {driver}"
            yield CheckResult(
                VERSIONS_TOPIC, "CUDA", found, "a torch for CUDA", Health.LOOK, "pip install --force-reinstall torch"
            )
        else:
            yield CheckResult(VERSIONS_TOPIC, "CUDA", "no NVIDIA driver, and a torch for CPUs", "", Health.NOT_HERE)
        return
    if not driver:
        yield CheckResult(
            VERSIONS_TOPIC, "CUDA", f"torch is made for CUDA {built}; no NVIDIA driver", "", Health.NOT_HERE
        )
        return
    known = collect_versions()
    found = f"driver {driver}, torch for CUDA {built}, NCCL {known['nccl'] or 'absent'}"
    if why := _explain_no_cuda():
        remedy = (
            f"nvidia-smi  says up to which CUDA this driver goes; install a torch for that, or a driver for {built}"
        )
        yield CheckResult(VERSIONS_TOPIC, "CUDA", f"{found}: {why}", "devices that torch can use", Health.WRONG, remedy)
        return
    others = [name for name in PRELOADED if "nccl" in here.environ.get(name, "").lower()]
    yield CheckResult(
        *(
            VERSIONS_TOPIC,
            "CUDA",
            found + "".join(f", another by {name}" for name in others),
            "each goes with the others",
        ),
        *(Health.LOOK if others else Health.OK, f"unset {' '.join(others)}  unless it is meant"),
    )


def _explain_no_cuda() -> str:
    """Why torch cannot use a device, in its own words; empty where it can."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    try:
        torch.cuda.init()
    except Exception as error:  # of the driver: too old, no fabric manager (802), no permission
        return str(error).strip().splitlines()[0]
    return str(said[0].message).splitlines()[0] if said else "torch sees no device"


def compare_versions(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[CheckResult]:
    """Of several nodes, by host: which one is not like the rest."""
    different = False
    for name in COMPARED_VERSIONS:
        values = {host: str(known.get(name, "")) for host, known in nodes.items()}
        usual, times = Counter(values.values()).most_common(1)[0]
        for host, value in values.items():
            if value != usual:
                different = True
                of = f"as {times} other node{'s' * (times > 1)} have" if times > 1 else "as the other has"
                yield CheckResult(
                    *(VERSIONS_TOPIC, f"{name} everywhere", f"{value or 'none'} on {host}", f"{usual or 'none'}, {of}"),
                    *(Health.WRONG, "use one environment on a shared file system, or one image, on all nodes"),
                    host,
                )
    if not different:
        yield CheckResult(
            VERSIONS_TOPIC, "versions everywhere", f"the same on all {len(nodes)} nodes", "the same", host=ALL_NODES
        )


LIMITS_TOPIC = "limits"
LEAST_FILES = 1024
LEAST_PROCESSES = 1024
LEAST_MEMORY_BYTES = 2e9
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MEMORY_IN_USE = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
CORE_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def check_open_files(here: CheckContext) -> Iterator[CheckResult]:
    """Ranks, worker processes and shards of data hold files and sockets."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _check_limit(
        "open files", allowed, LEAST_FILES, _raise_limit_command("ulimit -n", "nofile", most, LEAST_FILES, 65536)
    )


def check_processes(here: CheckContext) -> Iterator[CheckResult]:
    """Threads count as well."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NPROC)
    yield _check_limit(
        "processes", allowed, LEAST_PROCESSES, _raise_limit_command("ulimit -u", "nproc", most, LEAST_PROCESSES, 16384)
    )


def check_locked_memory(here: CheckContext) -> Iterator[CheckResult]:
    """InfiniBand sends from memory that must not be moved."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "unlimited" if allowed == resource.RLIM_INFINITY else size(allowed)
    if not INFINIBAND.is_dir():
        yield CheckResult(LIMITS_TOPIC, "locked memory", said, "matters with InfiniBand alone", Health.NOT_HERE)
        return
    enough = allowed == resource.RLIM_INFINITY
    yield CheckResult(
        *(LIMITS_TOPIC, "locked memory", said, "unlimited, for InfiniBand"),
        *(Health.OK if enough else Health.WRONG, "ulimit -l unlimited; containers: docker run --ulimit memlock=-1 …"),
    )


def _check_limit(name: str, allowed: int, least: int, remedy: str) -> CheckResult:
    enough = allowed == resource.RLIM_INFINITY or allowed >= least
    said = "unlimited" if allowed == resource.RLIM_INFINITY else f"{allowed:,}"
    return CheckResult(LIMITS_TOPIC, name, said, f"{least:,} or more", Health.OK if enough else Health.WRONG, remedy)


def _raise_limit_command(command: str, item: str, most: int, least: int, wanted: int) -> str:
    """A process may raise its limit up to that of its session, and no further."""
    if most == resource.RLIM_INFINITY or most >= least:
        return f"{command} {wanted if most == resource.RLIM_INFINITY else min(most, wanted)}"
    ask = f"ask an administrator for  * hard {item} {wanted}  in /etc/security/limits.conf"
    return f"no more is allowed here: {ask}; containers: docker run --ulimit {item}={wanted} …"


def check_memory_limit(here: CheckContext) -> Iterator[CheckResult]:
    import psutil

    whole, free = psutil.virtual_memory().total, float(psutil.virtual_memory().available)
    limit = next((amount for file in MEMORY_LIMITS if (amount := _read_amount(file)) is not None), None)
    of = f"of {size(whole)}"
    if limit is not None and limit < whole:
        used = next((amount for file in MEMORY_IN_USE if (amount := _read_amount(file)) is not None), 0.0)
        free, of = min(free, limit - used), f"of {size(limit)} that the scheduler or container grants"
    verdict = Health.OK if free >= LEAST_MEMORY_BYTES else Health.LOOK
    ask = "end other programs, or ask for more:  sbatch --mem=32G …,  docker run --memory=32g …"
    yield CheckResult(
        LIMITS_TOPIC, "memory", f"{size(free)} free {of}", f"{size(LEAST_MEMORY_BYTES)} or more", verdict, ask
    )


def check_cores(here: CheckContext) -> Iterator[CheckResult]:
    """A thread per core and rank: more of them take turns and wait for each other."""
    granted = count_granted_cores()
    ranks, threads = here.place.local_world, here.environ.get("OMP_NUM_THREADS", "")
    found = f"{number(granted, 3)} of {os.cpu_count()}, for {ranks} rank{'s' * (ranks > 1)}"
    if threads.isdecimal() and int(threads) * ranks > granted:
        fair = max(1, int(granted // ranks))
        yield CheckResult(
            *(
                LIMITS_TOPIC,
                "cores",
                f"{found}, OMP_NUM_THREADS={threads}",
                f"{fair} thread{'s' * (fair > 1)} per rank",
            ),
            *(Health.LOOK, f"export OMP_NUM_THREADS={fair}"),
        )
        return
    enough = granted >= ranks
    yield CheckResult(
        *(LIMITS_TOPIC, "cores", found, "one or more per rank", Health.OK if enough else Health.LOOK),
        "ask for more:  sbatch --cpus-per-task=4 …,  or start fewer ranks",
    )


def count_granted_cores() -> float:
    granted = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = CORE_QUOTA.read_text().split()
        granted = min(granted, int(quota) / int(period))
    return granted


def _read_amount(file: Path) -> float | None:
    with suppress(OSError, ValueError):
        amount = float(file.read_text())
        return amount if math.isfinite(amount) else None
    return None


FILES_TOPIC = "files"
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES, ENOUGH_SHARED_BYTES = 256e6, 1e9
LEAST_ROOM_BYTES, ENOUGH_ROOM_BYTES = 1e9, 5e9
LEAST_RATE_BYTES_S = 50e6
WRITTEN_BYTES = 64 << 20
BLOCK_BYTES = 4 << 20
WRITING_S = 0.4
SMALL_FILES = 50


def check_shared_memory(here: CheckContext) -> Iterator[CheckResult]:
    """Worker processes hand batches over in it; containers often have 64 MB, and die of a bus error."""
    if not SHARED_MEMORY.is_dir():
        yield CheckResult(FILES_TOPIC, "shared memory", f"there is no {SHARED_MEMORY}", "", Health.NOT_HERE)
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    yield CheckResult(
        *(
            FILES_TOPIC,
            "shared memory",
            f"{size(free)} free in {SHARED_MEMORY}",
            f"{size(ENOUGH_SHARED_BYTES)} or more",
        ),
        _rate_amount(free, LEAST_SHARED_BYTES, ENOUGH_SHARED_BYTES),
        "docker run --shm-size=8g …  or --ipc=host; pods: an emptyDir of medium Memory at /dev/shm",
    )


def check_disk_space(here: CheckContext) -> Iterator[CheckResult]:
    """For checkpoints."""
    folder = find_existing_folder(here.folder)
    usage, names = shutil.disk_usage(folder), os.statvfs(folder)
    remedy = "delete old runs and checkpoints, or write elsewhere with  --out FOLDER"
    if names.f_files and not names.f_favail:
        found = f"{folder}: no file can be added, though {size(usage.free)} are free"
        yield CheckResult(FILES_TOPIC, "room", found, "", Health.WRONG, remedy)
        return
    yield CheckResult(
        *(FILES_TOPIC, "room", f"{size(usage.free)} free of {size(usage.total)} at {folder}"),
        f"{size(ENOUGH_ROOM_BYTES)} or more",
        _rate_amount(usage.free, LEAST_ROOM_BYTES, ENOUGH_ROOM_BYTES),
        remedy,
    )


def check_disk_speed(here: CheckContext) -> Iterator[CheckResult]:
    """Written for less than half a second, read back, and some small files; all of it is deleted."""
    folder = find_existing_folder(here.folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".paceline-doctor-", dir=folder) as scratch:
            written, read = _measure_large_file(Path(scratch, "large"))
            small = _measure_small_files(Path(scratch))
    except OSError as error:
        yield CheckResult(
            *(FILES_TOPIC, "disk speed", f"{folder} cannot be written: {error.strerror}", "a folder to write to"),
            *(Health.WRONG, "write elsewhere with  --out FOLDER, or make room"),
        )
        return
    yield CheckResult(
        *(
            FILES_TOPIC,
            "disk speed",
            f"writes {size(written)}/s, reads {size(read)}/s, {number(small, 2)} small files/s",
        ),
        f"{size(LEAST_RATE_BYTES_S)}/s or more",
        Health.OK if min(written, read) >= LEAST_RATE_BYTES_S else Health.LOOK,
        "put runs on a faster file system with  --out FOLDER; checkpoints wait for this one",
    )


def find_existing_folder(folder: Path) -> Path:
    """The folder, or the one in which it would be made."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _measure_large_file(file: Path) -> tuple[float, float]:
    """(bytes written per second, until they are on the disk; bytes read per second)."""
    block, count = os.urandom(BLOCK_BYTES), 0
    with file.open("wb") as out:
        began = time.perf_counter()
        while count * BLOCK_BYTES < WRITTEN_BYTES and time.perf_counter() - began < WRITING_S:
            out.write(block)
            count += 1
        out.flush()
        os.fsync(out.fileno())
        written_s = time.perf_counter() - began
        with suppress(OSError):
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or memory would be read
    began = time.perf_counter()
    with file.open("rb", buffering=0) as content:
        while content.read(BLOCK_BYTES):
            pass
    return count * BLOCK_BYTES / written_s, count * BLOCK_BYTES / (time.perf_counter() - began)


def _measure_small_files(folder: Path) -> float:
    began = time.perf_counter()
    for index in range(SMALL_FILES):
        (folder / str(index)).write_bytes(b"x")
    return SMALL_FILES / (time.perf_counter() - began)


def _rate_amount(amount: float, least: float, enough: float) -> Health:
    return Health.OK if amount >= enough else Health.LOOK if amount >= least else Health.WRONG
