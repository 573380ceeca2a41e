"""One rank among its peers: its device, its threads, and the process group that joins them.

A world of one has no process group at all; the loop must work without. Where a library cannot, it gets a group of one.
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
"""With GPUs, small CPU tensors can be reduced as well."""
Backend = Literal["auto", "nccl", "gloo", "mpi"]
SINGLE_RANK_TIMEOUT_S = 1800.0  # for what a device is still at: in a group of one nobody waits for another
JOIN_COUNT = itertools.count()  # how often this process has joined others: each time they meet under another name
TEARDOWN_S = 1.0  # for closing connections after a failure


class RankCores(NamedTuple):
    """What one rank may use of its machine."""

    host: str
    cores: frozenset[int]


@contextmanager
def join_ranks(
    place: RankInfo, device: Literal["cpu", "cuda"], threads: int, timeout_s: float, backend: Backend = "auto"
) -> Iterator[torch.device]:
    """Take this rank's device and threads, join the others, and leave them at the end, however it ends."""
    own = _select_device(place, device, backend)
    if place.world == 1:
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        before = dist.is_initialized()
        yield own
        if dist.is_initialized() and not before:
            gc.collect()
            dist.destroy_process_group()
        return
    network.apply_network_settings(network.choose_network_settings(place, os.environ, device == "cuda"))
    if device == "cuda":
        enable_flight_recorder(os.environ)
    _init_group(place, own, timeout_s, _backend_name(backend, device))
    try:
        mine = RankCores(socket.gethostname(), frozenset(os.sched_getaffinity(0)))
        torch.set_num_threads(threads or divide_cores(mine, gather_objects(mine)))
        yield own
    except BaseException:
        # No collective any more, and no waiting for those in flight: the peers may never answer.
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(TEARDOWN_S)
        raise
    # A wrapped model is part of a cycle and holds the group. If both lived until the interpreter ends, the group's
    # threads would ask for a lock that is gone by then, and the process would abort after all its work is done.
    gc.collect()
    dist.destroy_process_group()


def init_single_rank_group(device: torch.device) -> None:
    """A group for a rank that is alone, until it leaves."""
    if not dist.is_initialized():
        soon = timedelta(seconds=SINGLE_RANK_TIMEOUT_S)
        dist.init_process_group(BACKEND[device.type], store=dist.HashStore(), rank=0, world_size=1, timeout=soon)


def create_subgroup(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """A group of some of the ranks, or of all once more, that gives up after the time of the one they joined.

    torch's own `new_group` would wait for half an hour, whatever was stated when the ranks joined.
    """
    return dist.new_group(None if ranks is None else list(ranks), timeout=_group_timeout(), backend=backend)


def create_device_mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A grid of all ranks whose groups give up after the time of the one they joined."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _set_pg_timeout(_group_timeout(), group)
    return mesh


def flatten_mesh(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """The ranks of all axes of a grid as one group."""
    group = mesh._flatten(name).get_group()
    _set_pg_timeout(_group_timeout(), group)
    return group


def _group_timeout() -> timedelta:
    """How long a collective of all ranks may take."""
    assert dist.group.WORLD is not None
    return cast(Any, dist.group.WORLD._get_backend(torch.device("cpu"))).options._timeout


def _select_device(place: RankInfo, device: Literal["cpu", "cuda"], backend: Backend) -> torch.device:
    """NCCL wants a device for each rank; under gloo ranks may share one, in turns."""
    if device == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible == 1 and place.launcher in ("srun", "mpirun"):
        index = 0  # the launcher shows every rank its own device
    elif visible and backend == "gloo":
        index = place.local_rank % visible
    elif visible < place.local_world:
        ways = [f"parallel.ranks={visible}", "parallel.backend=gloo  to share"] if visible else []
        raise UserError(
            f"each of the {place.local_world} ranks on {socket.gethostname()} needs a CUDA device of its own, "
            f"and {visible} can be seen; type  {'  or  '.join([*ways, 'parallel.device=cpu'])}"
        )
    else:
        index = place.local_rank
    own = torch.device("cuda", index)
    torch.cuda.set_device(own)
    return own


def _backend_name(backend: Backend, device: str) -> str:
    """What carries messages, in torch's words."""
    if backend == "nccl" and device == "cpu":
        raise UserError("parallel.backend=nccl joins CUDA devices, and these ranks have none; use gloo")
    if backend == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "parallel.backend=mpi: this torch was built without MPI; use parallel.backend=auto, "
            "under mpirun too, which then only starts the ranks"
        )
    words = {"auto": BACKEND[device], "nccl": BACKEND["cuda"], "gloo": "gloo", "mpi": "mpi"}
    return words[backend]


def _init_group(place: RankInfo, own: torch.device, timeout_s: float, carrier: str) -> None:
    try:
        dist.init_process_group(
            carrier,
            store=_open_store(place, timeout_s),
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=own if "nccl" in carrier else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if "Duplicate GPU" in str(error):
            raise UserError(
                f"several ranks on {socket.gethostname()} were given the same CUDA device; ask for one per rank, "
                "for example  srun --gpus-per-task=1 …,  or share it with  parallel.backend=gloo"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunFailed(
            f"could not join the {place.world} ranks at {place.address}:{place.port} within {timeout_s:g} s: {reason}"
        ) from error


def _open_store(place: RankInfo, timeout_s: float) -> dist.Store:
    """Where the ranks meet, when all of them are there: with the main rank, or with torchrun, whose store outlives its
    restarts, with the addresses of ranks that are gone."""
    ours = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    main = ours and place.rank == 0
    if not main:
        network.wait_for_main_rank(place, timeout_s)
    limit = timedelta(seconds=timeout_s)
    everyone = dist.TCPStore(
        place.address,
        place.port,
        place.world,
        is_master=main,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=_open_listener(place) if main else None,
    )
    start, time_ = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), next(JOIN_COUNT)
    store = dist.PrefixStore(f"start {start} join {time_}", everyone)
    store.set(f"rank {place.rank}", socket.gethostname())
    _wait_for_ranks(store, place.world, timeout_s)
    return store


def _open_listener(place: RankInfo) -> int | None:
    """A socket for the ranks to meet at; None where this process has one already, from when it joined before."""
    try:
        return network.open_listener(place).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None  # torch shares what it has there, and complains if that is somebody else's


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
    """What each rank has, in their order, on all of them. A rank that has joined no others has its own."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def raise_on_all(wrong: Exception | None) -> None:
    """What is wrong on one rank is raised on all of them, so that none waits for the others."""
    for outcome in gather_objects(wrong):
        if outcome is not None:
            raise outcome


def broadcast_from_main(get: Callable[[], T]) -> T:
    """What the main rank gets, on every rank; if it is refused, all are."""
    box: list[Any] = [None]
    together = dist.is_available() and dist.is_initialized()
    if not together or dist.get_rank() == 0:
        try:
            box = [get()]
        except PacelineError as error:
            box = [error]
    if together:
        dist.broadcast_object_list(box)
    if isinstance(box[0], PacelineError):
        raise box[0]
    return cast(T, box[0])


def divide_cores(mine: RankCores, everyone: Sequence[RankCores]) -> int:
    """Threads for this rank: each of its cores, divided by the ranks that may use it.

    srun and mpirun often bind each rank to cores of its own, which are then not to be divided again.
    """
    users = Counter(core for other in everyone if other.host == mine.host for core in other.cores)
    return max(1, int(sum(1 / users[core] for core in mine.cores) + 1e-9))
