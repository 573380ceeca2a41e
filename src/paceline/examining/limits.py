"""What the system grants a process: files, processes, locked memory, memory and cores."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.examining.results import CheckResult, Health, Surroundings
from paceline.launch.network import INFINIBAND
from paceline.record.units import number, size

TOPIC = "limits"
LEAST_FILES = 1024
LEAST_PROCESSES = 1024
LEAST_MEMORY_BYTES = 2e9
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MEMORY_IN_USE = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
CORE_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def open_files(here: Surroundings) -> Iterator[CheckResult]:
    """Ranks, worker processes and shards of data hold files and sockets."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _limit("open files", allowed, LEAST_FILES, _raise("ulimit -n", "nofile", most, LEAST_FILES, 65536))


def processes(here: Surroundings) -> Iterator[CheckResult]:
    """Threads count as well."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NPROC)
    yield _limit("processes", allowed, LEAST_PROCESSES, _raise("ulimit -u", "nproc", most, LEAST_PROCESSES, 16384))


def locked_memory(here: Surroundings) -> Iterator[CheckResult]:
    """InfiniBand sends from memory that must not be moved."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = "unlimited" if allowed == resource.RLIM_INFINITY else size(allowed)
    if not INFINIBAND.is_dir():
        yield CheckResult(TOPIC, "locked memory", said, "matters with InfiniBand alone", Health.NOT_HERE)
        return
    enough = allowed == resource.RLIM_INFINITY
    yield CheckResult(
        *(TOPIC, "locked memory", said, "unlimited, for InfiniBand"),
        *(Health.OK if enough else Health.WRONG, "ulimit -l unlimited; containers: docker run --ulimit memlock=-1 …"),
    )


def _limit(name: str, allowed: int, least: int, remedy: str) -> CheckResult:
    enough = allowed == resource.RLIM_INFINITY or allowed >= least
    said = "unlimited" if allowed == resource.RLIM_INFINITY else f"{allowed:,}"
    return CheckResult(TOPIC, name, said, f"{least:,} or more", Health.OK if enough else Health.WRONG, remedy)


def _raise(command: str, item: str, most: int, least: int, wanted: int) -> str:
    """A process may raise its limit up to that of its session, and no further."""
    if most == resource.RLIM_INFINITY or most >= least:
        return f"{command} {wanted if most == resource.RLIM_INFINITY else min(most, wanted)}"
    ask = f"ask an administrator for  * hard {item} {wanted}  in /etc/security/limits.conf"
    return f"no more is allowed here: {ask}; containers: docker run --ulimit {item}={wanted} …"


def memory(here: Surroundings) -> Iterator[CheckResult]:
    import psutil

    whole, free = psutil.virtual_memory().total, float(psutil.virtual_memory().available)
    limit = next((amount for file in MEMORY_LIMITS if (amount := _amount(file)) is not None), None)
    of = f"of {size(whole)}"
    if limit is not None and limit < whole:
        used = next((amount for file in MEMORY_IN_USE if (amount := _amount(file)) is not None), 0.0)
        free, of = min(free, limit - used), f"of {size(limit)} that the scheduler or container grants"
    verdict = Health.OK if free >= LEAST_MEMORY_BYTES else Health.LOOK
    ask = "end other programs, or ask for more:  sbatch --mem=32G …,  docker run --memory=32g …"
    yield CheckResult(TOPIC, "memory", f"{size(free)} free {of}", f"{size(LEAST_MEMORY_BYTES)} or more", verdict, ask)


def cores(here: Surroundings) -> Iterator[CheckResult]:
    """A thread per core and rank: more of them take turns and wait for each other."""
    granted = granted_cores()
    ranks, threads = here.place.local_world, here.environ.get("OMP_NUM_THREADS", "")
    found = f"{number(granted, 3)} of {os.cpu_count()}, for {ranks} rank{'s' * (ranks > 1)}"
    if threads.isdecimal() and int(threads) * ranks > granted:
        fair = max(1, int(granted // ranks))
        yield CheckResult(
            *(TOPIC, "cores", f"{found}, OMP_NUM_THREADS={threads}", f"{fair} thread{'s' * (fair > 1)} per rank"),
            *(Health.LOOK, f"export OMP_NUM_THREADS={fair}"),
        )
        return
    enough = granted >= ranks
    yield CheckResult(
        *(TOPIC, "cores", found, "one or more per rank", Health.OK if enough else Health.LOOK),
        "ask for more:  sbatch --cpus-per-task=4 …,  or start fewer ranks",
    )


def granted_cores() -> float:
    granted = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = CORE_QUOTA.read_text().split()
        granted = min(granted, int(quota) / int(period))
    return granted


def _amount(file: Path) -> float | None:
    with suppress(OSError, ValueError):
        amount = float(file.read_text())
        return amount if math.isfinite(amount) else None
    return None
