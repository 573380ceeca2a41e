"""Join the ranks: device, threads and process group of one rank.

A single rank has no process group, unless a library needs one (`init_single_rank_group`).
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
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

from paceline.errors import PacelineError, RunFailed, UserError, join_names
from paceline.launch import network
from paceline.launch.environment import RankInfo
from paceline.launch.hang_traces import enable_flight_recorder

T = TypeVar("T")
BACKEND = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""With GPUs, gloo reduces small CPU tensors."""
Backend = Literal["auto", "nccl", "gloo", "mpi"]
SINGLE_RANK_TIMEOUT_S = 1800.0
JOIN_COUNT = itertools.count()
"""Each time that this process joins others, they meet under another name."""
TEARDOWN_S = 1.0


class RankCores(NamedTuple):
    host: str
    cores: frozenset[int]


@contextmanager
def join_ranks(
    rank_info: RankInfo, device: Literal["cpu", "cuda"], threads: int, timeout_s: float, backend: Backend = "auto"
) -> Iterator[torch.device]:
    """Set this rank's device and threads and join the other ranks; leave them on exit, also after a failure."""
    own = _select_device(rank_info, device, backend)
    if rank_info.world == 1:
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        before = dist.is_initialized()
        yield own
        if dist.is_initialized() and not before:
            gc.collect()
            dist.destroy_process_group()
        return
    network.apply_network_settings(network.choose_network_settings(rank_info, os.environ, device == "cuda"))
    if device == "cuda":
        enable_flight_recorder(os.environ)
    _init_group(rank_info, own, timeout_s, _backend_name(backend, device))
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
    # A wrapped model is part of a reference cycle and holds the group. If both lived until the interpreter is
    # finalised, the group's threads would take a lock that is gone by then, and the process would abort.
    gc.collect()
    dist.destroy_process_group()


def init_single_rank_group(device: torch.device) -> None:
    """Create a process group of one rank, for libraries that need a group."""
    if not dist.is_initialized():
        timeout = timedelta(seconds=SINGLE_RANK_TIMEOUT_S)
        dist.init_process_group(BACKEND[device.type], store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def create_subgroup(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Create a group of some ranks, or of all, with the timeout of the main group.

    torch's own `new_group` would wait for half an hour, whatever timeout the ranks joined with.
    """
    return dist.new_group(None if ranks is None else list(ranks), timeout=_group_timeout(), backend=backend)


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
    return cast(Any, dist.group.WORLD._get_backend(torch.device("cpu"))).options._timeout


def _select_device(rank_info: RankInfo, device: Literal["cpu", "cuda"], backend: Backend) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 1 and rank_info.launcher in ("srun", "mpirun"):
        index = 0  # the launcher made only this rank's device visible
    elif visible and backend == "gloo":
        index = rank_info.local_rank % visible
    elif visible < rank_info.local_world:
        options = [f"parallel.ranks={visible}", "parallel.backend=gloo  to share"] if visible else []
        raise UserError(
            f"each of the {rank_info.local_world} ranks on {socket.gethostname()} needs its own CUDA device, "
            f"and {visible} can be seen; type  {'  or  '.join([*options, 'parallel.device=cpu'])}",
            code="unavailable",
            key="parallel.ranks",
        )
    else:
        index = rank_info.local_rank
    own = torch.device("cuda", index)
    torch.cuda.set_device(own)
    return own


def _backend_name(backend: Backend, device: str) -> str:
    if backend == "nccl" and device == "cpu":
        raise UserError(
            "parallel.backend=nccl joins CUDA devices, and these ranks have none; use gloo",
            code="conflict",
            key="parallel.backend",
        )
    if backend == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "parallel.backend=mpi: this torch was built without MPI; use parallel.backend=auto, "
            "under mpirun too, which then only starts the ranks",
            code="unavailable",
            key="parallel.backend",
        )
    names = {"auto": BACKEND[device], "nccl": BACKEND["cuda"], "gloo": "gloo", "mpi": "mpi"}
    return names[backend]


def _init_group(rank_info: RankInfo, own: torch.device, timeout_s: float, backend: str) -> None:
    try:
        dist.init_process_group(
            backend,
            store=_open_store(rank_info, timeout_s),
            rank=rank_info.rank,
            world_size=rank_info.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=own if "nccl" in backend else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if "Duplicate GPU" in str(error):
            raise UserError(
                f"several ranks on {socket.gethostname()} were given the same CUDA device; ask for one per rank, "
                "for example  srun --gpus-per-task=1 …,  or share it with  parallel.backend=gloo",
                code="conflict",
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunFailed(
            f"could not join the {rank_info.world} ranks at {rank_info.address}:{rank_info.port} "
            f"within {timeout_s:g} s: {reason}",
            code="rank-unresponsive",
        ) from error


def _open_store(rank_info: RankInfo, timeout_s: float) -> dist.Store:
    """Open the store at the main rank or at torchrun, and wait until all ranks have joined it.

    torchrun's store outlives its restarts, with the addresses of ranks that are gone, hence the prefix.
    """
    main = rank_info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not main:
        network.wait_for_main_rank(rank_info, timeout_s)
    shared = dist.TCPStore(
        rank_info.address,
        rank_info.port,
        rank_info.world,
        is_master=main,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=_open_listener(rank_info) if main else None,
    )
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"start {restarts} join {next(JOIN_COUNT)}", shared)
    store.set(f"rank {rank_info.rank}", socket.gethostname())
    _wait_for_ranks(store, rank_info.world, timeout_s)
    return store


def _open_listener(rank_info: RankInfo) -> int | None:
    """Open the socket of the store; return None if this process has one already, from an earlier join."""
    try:
        return network.open_listener(rank_info).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None  # torch shares its own socket, and fails if another process has the port


def _wait_for_ranks(store: dist.Store, world: int, timeout_s: float) -> None:
    wanted = [f"rank {rank}" for rank in range(world)]
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not store.check(wanted):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"timed out waiting for {join_names([name for name in wanted if not store.check([name])])}"
            )
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
    """Return the threads for this rank: the sum of its cores, each divided by the ranks that share it.

    srun and mpirun often bind each rank to its own cores, which must not be divided again.
    """
    users = Counter(core for other in everyone if other.host == mine.host for core in other.cores)
    return max(1, int(sum(1 / users[core] for core in mine.cores) + 1e-9))
