"""Join the ranks: device, threads and process group of one rank.

A single rank has no process group, unless a library needs one (`init_single_rank_group`).
"""

import errno
import gc
import itertools
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from paceline.errors import PacelineError, RunFailed, UserError, get_first_line, join_names
from paceline.launch import network
from paceline.launch.environment import RankInfo
from paceline.launch.hang_traces import enable_flight_recorder
from paceline.launch.shared_device import patch_functional_gathers

T = TypeVar("T")
BACKEND = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # with GPUs, gloo reduces small CPU tensors
Backend = Literal["auto", "nccl", "gloo", "mpi"]
SINGLE_RANK_TIMEOUT_S = 1800.0
JOIN_COUNT = itertools.count()  # each time that this process joins others, they meet under another name
TEARDOWN_S = 1.0


class RankCores(NamedTuple):
    host: str
    cores: frozenset[int]


@contextmanager
def join_ranks(
    info: RankInfo, device: Literal["cpu", "cuda"], threads: int, timeout_s: float, backend: Backend = "auto"
) -> Iterator[torch.device]:
    """Set this rank's device and threads and join the other ranks; leave them on exit, also after a failure."""
    own = _select_device(info, device, backend)
    _forget_meshes(own)
    if info.world == 1:
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        before = dist.is_initialized()
        yield own
        if dist.is_initialized() and not before:
            gc.collect()
            dist.destroy_process_group()
        return
    network.apply_network_settings(network.choose_network_settings(info, os.environ, device == "cuda"))
    if device == "cuda":
        enable_flight_recorder(os.environ)
    if device == "cuda" and backend == "gloo":
        patch_functional_gathers()
    _init_group(info, own, timeout_s, _backend_name(backend, device))
    try:
        mine = RankCores(socket.gethostname(), frozenset(os.sched_getaffinity(0)))
        torch.set_num_threads(threads or divide_cores(mine, gather_objects(mine)))
        yield own
    except BaseException:
        # Do not wait for collectives in flight: the peers may never answer.
        teardown = threading.Thread(target=dist.destroy_process_group, daemon=True)
        teardown.start()
        teardown.join(TEARDOWN_S)
        raise
    gc.collect()  # a wrapped model is in a reference cycle and holds the group, whose threads would abort at exit
    dist.destroy_process_group()


def _forget_meshes(device: torch.device) -> None:
    """Drop what DTensor has cached: to it a mesh with other groups is equal, and those of an earlier run are gone.

    Each thread has such a cache, so that of a device's backward passes is dropped in one of them.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
        if device.type == "cuda":
            x = torch.ones((), device=device, requires_grad=True)
            x.register_hook(lambda gradient: debug._clear_sharding_prop_cache())
            (2 * x).backward()


def init_single_rank_group(device: torch.device) -> None:
    """Create a process group of one rank, for libraries that need a group."""
    if not dist.is_initialized():
        timeout = timedelta(seconds=SINGLE_RANK_TIMEOUT_S)
        dist.init_process_group(BACKEND[device.type], store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def create_subgroup(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Create a group of some ranks, or of all, with the timeout of the main group, not torch's half an hour."""
    members = None if ranks is None else list(ranks)
    group: dist.ProcessGroup = dist.new_group(members, timeout=_group_timeout(), backend=backend)
    return group


def create_device_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Create a mesh of all ranks whose groups have the timeout of the main group."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _set_pg_timeout(_group_timeout(), group)
    return mesh


def flatten_mesh(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    group = mesh._flatten(name).get_group()
    _set_pg_timeout(_group_timeout(), group)
    return group


def _group_timeout() -> timedelta:
    assert dist.group.WORLD is not None
    timeout: timedelta = cast(Any, dist.group.WORLD._get_backend(torch.device("cpu"))).options._timeout
    return timeout


def _select_device(info: RankInfo, device: Literal["cpu", "cuda"], backend: Backend) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 1 and info.launcher in ("srun", "mpirun"):
        index = 0  # the launcher made only this rank's device visible
    elif visible and backend == "gloo":
        index = info.local_rank % visible
    elif visible < info.local_world:
        options = [f"parallel.ranks={visible}", "parallel.backend=gloo  to share"] if visible else []
        message = f"the {info.local_world} ranks on {socket.gethostname()} need a CUDA device each, {visible} can be "
        message += f"seen; type  {'  or  '.join([*options, 'parallel.device=cpu'])}"
        raise UserError(message, code="unavailable", key="parallel.ranks")
    else:
        index = info.local_rank
    own = torch.device("cuda", index)
    torch.cuda.set_device(own)
    return own


def _backend_name(backend: Backend, device: str) -> str:
    key = "parallel.backend"
    if backend == "nccl" and device == "cpu":
        raise UserError(f"{key}=nccl joins CUDA devices, and these ranks have none; use gloo", code="conflict", key=key)
    if backend == "mpi" and not dist.is_mpi_available():
        message = f"{key}=mpi: this torch was built without MPI; use {key}=auto, under mpirun too"
        raise UserError(message, code="unavailable", key=key)
    return {"auto": BACKEND[device], "nccl": BACKEND["cuda"]}.get(backend, backend)


def _init_group(info: RankInfo, own: torch.device, timeout_s: float, backend: str) -> None:
    try:
        dist.init_process_group(
            backend,
            store=_open_store(info, timeout_s),
            rank=info.rank,
            world_size=info.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=own if "nccl" in backend else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if "Duplicate GPU" in str(error):
            message = f"several ranks on {socket.gethostname()} were given the same CUDA device; ask for one per rank"
            message += " with  srun --gpus-per-task=1 …,  or share it with  parallel.backend=gloo"
            raise UserError(message, code="conflict") from None
        where, reason = f"{info.address}:{info.port}", get_first_line(error)
        message = f"could not join the {info.world} ranks at {where} within {timeout_s:g} s: {reason}"
        raise RunFailed(message, code="rank-unresponsive") from error


def _open_store(info: RankInfo, timeout_s: float) -> dist.Store:
    """Open the store, and wait until all ranks have joined it."""
    if not _has_store(info):
        network.wait_for_main_rank(info, timeout_s)
    store = open_store(info, timeout_s, f"start {next(JOIN_COUNT)}")
    store.set(f"rank {info.rank}", socket.gethostname())
    _wait_for_ranks(store, info.world, timeout_s)
    return store


def open_store(info: RankInfo, timeout_s: float, purpose: str) -> dist.Store:
    """Open the store at the main rank or at torchrun, with a name for each purpose.

    torchrun's store outlives its restarts, with the addresses of ranks that are gone, hence their number in the name.
    """
    shared = dist.TCPStore(
        info.address,
        info.port,
        info.world,
        is_master=_has_store(info),
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=_open_listener(info) if _has_store(info) else None,
    )
    return dist.PrefixStore(f"{purpose} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)


def _has_store(info: RankInfo) -> bool:
    return info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _open_listener(info: RankInfo) -> int | None:
    """Open the socket of the store; return None if this process has one already, from an earlier join."""
    try:
        return network.open_listener(info).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None  # torch shares its own socket, and fails if another process has the port
        raise


def _wait_for_ranks(store: dist.Store, world: int, timeout_s: float) -> None:
    wanted = [f"rank {rank}" for rank in range(world)]
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not store.check(wanted):
        if time.monotonic() > deadline:
            missing = [name for name in wanted if not store.check([name])]
            raise RuntimeError(f"timed out waiting for {join_names(missing)}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks, in their order, on every rank; only `mine` without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def raise_on_all(error: Exception | None) -> None:
    """Raise the error of any rank on all ranks, so that none waits for the others."""
    for raised in gather_objects(error):
        if raised is not None:
            raise raised


def broadcast_from_main(get: Callable[[], T]) -> T:
    """Call `get` on the main rank and return its result, or raise its error, on every rank."""
    box: list[Any] = [None]
    joined = dist.is_available() and dist.is_initialized()
    if not joined or dist.get_rank() == 0:
        try:
            box = [get()]
        except PacelineError as error:
            box = [error]
    if joined:
        dist.broadcast_object_list(box)
    if isinstance(box[0], PacelineError):
        raise box[0]
    return cast(T, box[0])


def divide_cores(mine: RankCores, everyone: Sequence[RankCores]) -> int:
    """Return the threads for this rank: the sum of its cores, each divided by the ranks that share it."""
    users = Counter(core for other in everyone if other.host == mine.host for core in other.cores)
    return max(1, int(sum(1 / users[core] for core in mine.cores) + 1e-9))
