"""Check this machine: installed software, limits of a process, disks, and how fast the data of a run are loaded."""

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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from paceline.config import RunSpec
from paceline.diagnostics.results import ALL_NODES, CheckContext, CheckResult, Health
from paceline.errors import PacelineError, get_first_line
from paceline.io.format import number, size
from paceline.launch.environment import SINGLE_RANK
from paceline.launch.network import INFINIBAND
from paceline.runlog.machine import describe_environment

COMPARED_VERSIONS = ("paceline", "python", "torch", "numpy", "tokenizers", "cuda", "nccl", "driver")
DRIVER = Path("/proc/driver/nvidia/version")
MIN_FILES, MIN_PROCESSES = 1024, 1024
CORE_QUOTA = Path("/sys/fs/cgroup/cpu.max")
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES, ENOUGH_SHARED_BYTES = 256e6, 1e9
MIN_DISK_BYTES, ENOUGH_DISK_BYTES = 1e9, 5e9
MIN_DISK_BYTES_S = 50e6
WRITTEN_BYTES, BLOCK_BYTES, WRITING_S = 64 << 20, 4 << 20, 0.4
SMALL_FILES = 50
LOADING_S, MAX_BATCHES = 1.0, 200


def collect_versions() -> dict[str, str]:
    """Return the versions that nodes compare; "" for what a node does not have."""
    environment = describe_environment()
    found = {name: str(environment.get(name) or "") for name in COMPARED_VERSIONS}
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()
    return found | {"cuda": torch.version.cuda or "", "nccl": ".".join(map(str, nccl)), "driver": read_driver_version()}


def read_driver_version() -> str:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def check_software(context: CheckContext) -> Iterator[CheckResult]:
    versions = collect_versions()
    found = ", ".join(f"{name} {versions[name]}" for name in COMPARED_VERSIONS[:5] if versions[name])
    yield CheckResult("versions", "software", found)


def check_cuda(context: CheckContext) -> Iterator[CheckResult]:
    result = partial(CheckResult, "versions", "CUDA")
    driver, built = read_driver_version(), torch.version.cuda
    if built is None and driver:
        found = f"torch {torch.__version__} is made for CPUs, and this machine has NVIDIA driver {driver}"
        yield result(found, "a torch for CUDA", Health.LOOK, "pip install --force-reinstall torch")
    elif built is None:
        yield result("no NVIDIA driver, and a torch for CPUs", verdict=Health.NOT_HERE)
    elif not driver:
        yield result(f"torch is made for CUDA {built}; no NVIDIA driver", verdict=Health.NOT_HERE)
    else:
        found = f"driver {driver}, torch for CUDA {built}, NCCL {collect_versions()['nccl'] or 'absent'}"
        if reason := _explain_no_cuda():
            remedy = f"nvidia-smi  shows the driver's newest CUDA; install a torch for it, or a driver for {built}"
            yield result(f"{found}: {reason}", "devices that torch can use", Health.WRONG, remedy)
            return
        yield result(found, "matching versions")


def _explain_no_cuda() -> str:
    """Return torch's reason for not using a device; "" if it can use one."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    try:
        torch.cuda.init()
    except Exception as error:  # of the driver: too old, no fabric manager (802), no permission
        return get_first_line(error)
    return str(raised[0].message).splitlines()[0] if raised else "torch sees no device"


def compare_versions(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[CheckResult]:
    different = False
    for name in COMPARED_VERSIONS:
        values = {host: str(known.get(name, "")) for host, known in nodes.items()}
        usual, times = Counter(values.values()).most_common(1)[0]
        for host, value in values.items():
            if value != usual:
                different = True
                others = f"{times} other nodes have" if times > 1 else "the other has"
                expected = f"{usual or 'none'}, as {others}"
                remedy = "use one environment on a shared file system, or one image, on all nodes"
                check, found = f"{name} everywhere", f"{value or 'none'} on {host}"
                yield CheckResult("versions", check, found, expected, Health.WRONG, remedy, host)
    if not different:
        found = f"the same on all {len(nodes)} nodes"
        yield CheckResult("versions", "versions everywhere", found, "the same", host=ALL_NODES)


def check_open_files(context: CheckContext) -> Iterator[CheckResult]:
    """Check the limit of open files: ranks, worker processes and shards of data hold files and sockets."""
    yield _check_limit("open files", "ulimit -n", "nofile", resource.RLIMIT_NOFILE, MIN_FILES, 65536)


def check_processes(context: CheckContext) -> Iterator[CheckResult]:
    yield _check_limit("processes", "ulimit -u", "nproc", resource.RLIMIT_NPROC, MIN_PROCESSES, 16384)


def _check_limit(name: str, command: str, item: str, limit: int, least: int, wanted: int) -> CheckResult:
    """Compare a soft limit with the least that runs need; a process may raise it up to the hard limit."""
    allowed, most = (math.inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(limit))
    if most >= least:
        remedy = f"{command} {min(most, wanted)}"
    else:
        remedy = f"no more is allowed here: ask an administrator for  * hard {item} {wanted}  in "
        remedy += f"/etc/security/limits.conf; containers: docker run --ulimit {item}={wanted} …"
    found = "unlimited" if allowed == math.inf else f"{allowed:,}"
    verdict = Health.OK if allowed >= least else Health.WRONG
    return CheckResult("limits", name, found, f"{least:,} or more", verdict, remedy)


def check_locked_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Check the limit of locked memory, from which InfiniBand sends."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = allowed == resource.RLIM_INFINITY
    result = partial(CheckResult, "limits", "locked memory", "unlimited" if unlimited else size(allowed))
    if INFINIBAND.is_dir():
        remedy = "ulimit -l unlimited; containers: docker run --ulimit memlock=-1 …"
        yield result("unlimited, for InfiniBand", Health.OK if unlimited else Health.WRONG, remedy)
    else:
        yield result("matters with InfiniBand alone", Health.NOT_HERE)


def check_cores(context: CheckContext) -> Iterator[CheckResult]:
    """Check for a core per rank and thread: more threads take turns and wait for each other."""
    granted = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = CORE_QUOTA.read_text().split()
        granted = min(granted, int(quota) / int(period))
    ranks, threads = context.rank_info.local_world, context.environ.get("OMP_NUM_THREADS", "")
    found = f"{number(granted, 3)} of {os.cpu_count()}, for {ranks} rank{'s' * (ranks > 1)}"
    if threads.isdecimal() and int(threads) * ranks > granted:
        fair = max(1, int(granted // ranks))
        expected, remedy = f"{fair} thread{'s' * (fair > 1)} per rank", f"export OMP_NUM_THREADS={fair}"
        found += f", OMP_NUM_THREADS={threads}"
        yield CheckResult("limits", "cores", found, expected, Health.LOOK, remedy)
    else:
        verdict = Health.OK if granted >= ranks else Health.LOOK
        remedy = "ask for more:  sbatch --cpus-per-task=4 …,  or start fewer ranks"
        yield CheckResult("limits", "cores", found, "one or more per rank", verdict, remedy)


def check_shared_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Check the memory in which batches are passed; containers often have 64 MB, and die of a bus error."""
    if not SHARED_MEMORY.is_dir():
        yield CheckResult("files", "shared memory", f"there is no {SHARED_MEMORY}", verdict=Health.NOT_HERE)
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    found, expected = f"{size(free)} free in {SHARED_MEMORY}", f"{size(ENOUGH_SHARED_BYTES)} or more"
    remedy = "docker run --shm-size=8g …  or --ipc=host; pods: an emptyDir of medium Memory at /dev/shm"
    verdict = _judge_amount(free, MIN_SHARED_BYTES, ENOUGH_SHARED_BYTES)
    yield CheckResult("files", "shared memory", found, expected, verdict, remedy)


def check_disk_space(context: CheckContext) -> Iterator[CheckResult]:
    folder = find_existing_folder(context.folder)
    usage = shutil.disk_usage(folder)
    remedy = "delete old runs and checkpoints, or write elsewhere with  --out FOLDER"
    found = f"{size(usage.free)} free of {size(usage.total)} at {folder}"
    verdict = _judge_amount(usage.free, MIN_DISK_BYTES, ENOUGH_DISK_BYTES)
    yield CheckResult("files", "room", found, f"{size(ENOUGH_DISK_BYTES)} or more", verdict, remedy)


def check_disk_speed(context: CheckContext) -> Iterator[CheckResult]:
    """Write for less than half a second, read it back, write some small files, and delete all of it."""
    folder = find_existing_folder(context.folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".paceline-doctor-", dir=folder) as scratch:
            written, read = _measure_large_file(Path(scratch, "large"))
            start_s = time.perf_counter()
            for index in range(SMALL_FILES):
                Path(scratch, str(index)).write_bytes(b"x")
            small = SMALL_FILES / (time.perf_counter() - start_s)
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        remedy = "write elsewhere with  --out FOLDER, or make room"
        yield CheckResult("files", "disk speed", found, "a folder to write to", Health.WRONG, remedy)
        return
    found = f"writes {size(written)}/s, reads {size(read)}/s, {number(small, 2)} small files/s"
    verdict = Health.OK if min(written, read) >= MIN_DISK_BYTES_S else Health.LOOK
    remedy = "put runs on a faster file system with  --out FOLDER; checkpoints wait for this one"
    yield CheckResult("files", "disk speed", found, f"{size(MIN_DISK_BYTES_S)}/s or more", verdict, remedy)


def find_existing_folder(folder: Path) -> Path:
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _measure_large_file(file: Path) -> tuple[float, float]:
    """Return (bytes/s written to the disk, bytes/s read)."""
    block, count = os.urandom(BLOCK_BYTES), 0
    with file.open("wb") as out:
        start_s = time.perf_counter()
        while count * BLOCK_BYTES < WRITTEN_BYTES and time.perf_counter() - start_s < WRITING_S:
            out.write(block)
            count += 1
        out.flush()
        os.fsync(out.fileno())
        written_s = time.perf_counter() - start_s
        with suppress(OSError):
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or the page cache would be read
    start_s = time.perf_counter()
    with file.open("rb", buffering=0) as content:
        while content.read(BLOCK_BYTES):
            pass
    return count * BLOCK_BYTES / written_s, count * BLOCK_BYTES / (time.perf_counter() - start_s)


def _judge_amount(amount: float, least: float, enough: float) -> Health:
    return Health.OK if amount >= enough else Health.LOOK if amount >= least else Health.WRONG


def check_loading(context: CheckContext) -> Iterator[CheckResult]:
    """Check that one rank loads the data of the run file as fast as a device consumes them."""
    from paceline.workload import Workload, build_workload

    result, spec = partial(CheckResult, "data", "loading"), context.spec
    if spec is None:
        yield result("no run file given", verdict=Health.NOT_HERE, remedy="paceline doctor RUN.yaml")
        return
    try:
        workload = build_workload(spec)
        if not isinstance(workload, Workload):
            yield result(f"{spec.workload} has no batches", verdict=Health.NOT_HERE)
            return
        workload.prepare(lambda text: None)
        rate = _measure_samples_s(spec, workload)
    except PacelineError as error:
        yield result(str(error), "data that can be read", Health.WRONG)
        return
    needed = _plan_samples_s(spec)
    expected = f"{number(needed, 3)} samples/s, which one device takes by the plan" if needed else ""
    verdict = Health.LOOK if needed and rate < needed else Health.OK
    remedy = "data.workers=4  loads samples in worker processes; or store them in the form that the model takes"
    yield result(f"{number(rate, 3)} samples/s by one rank", expected, verdict, remedy)


def _measure_samples_s(spec: RunSpec, workload: Any) -> float:
    from paceline.data.order import Order
    from paceline.data.prefetch import Loader, make_collate
    from paceline.data.samples import load_training_samples
    from paceline.data.workers import start_workers
    from paceline.layout import layout_of

    layout = layout_of(spec)
    with start_workers(workload, SINGLE_RANK, -(-layout.global_batch // layout.data)):
        samples = load_training_samples(workload)
        loader = Loader(samples, Order.of(spec.train, samples), layout, 0, make_collate(samples.batch, False))
        batches = iter(loader.prefetch(0, MAX_BATCHES))
        next(batches)
        loaded, start_s = 0, time.perf_counter()
        for batch in islice(batches, MAX_BATCHES - 1):
            loaded += -(-batch.samples // layout.data)
            if time.perf_counter() - start_s > LOADING_S:
                break
        return loaded / max(time.perf_counter() - start_s, 1e-9)


def _plan_samples_s(spec: RunSpec) -> float | None:
    from paceline.planner.plan import plan

    try:
        found = plan(spec, devices=(1,))
    except PacelineError:
        return None
    return found.cost_model.global_batch / found.base.step_s if found.base is not None else None
