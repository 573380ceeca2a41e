"""Join and leave the process group; ranks, sizes and build options; what is not supported."""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.errors import PacelineError, UserError
from paceline.io.format import plural
from paceline.io.terminal import warn
from paceline.launch.environment import SINGLE_RANK, RankInfo, detect_rank
from paceline.launch.process_group import create_subgroup, join_ranks

TIMEOUT_S = 1800.0  # peers wait while the main rank evaluates or downloads: as long as torch itself waits


class UnsupportedHorovodFeature(PacelineError, NotImplementedError):
    """A part of Horovod that is not supported."""

    exit_code = 2


class UnsupportedHorovodModule(UnsupportedHorovodFeature, ModuleNotFoundError):
    """A module of Horovod that is not supported; an ImportError, so that scripts may catch it."""


def _reject(what: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that raises, whatever it is called with."""

    def call(*args: Any, **options: Any) -> NoReturn:
        raise UnsupportedHorovodFeature(f"paceline.horovod has no {what}; {instead}")

    return call


alltoall = alltoall_async = _reject("alltoall", "use torch.distributed.all_to_all_single")
reducescatter = reducescatter_async = _reject("reducescatter", "use torch.distributed.reduce_scatter_tensor")
join = _reject("join", "give every rank the same number of batches: torch's DistributedSampler does")
sparse_allreduce_async = _reject("sparse_allreduce_async", "use hvd.allreduce(tensor.to_dense())")
start_timeline = stop_timeline = _reject("timelines", "paceline measure  says where the time of a step goes")
raise_no_adasum = _reject("Adasum", "use op=hvd.Average")
raise_no_communicators = _reject("communicators of MPI", "call hvd.init() without them: all ranks take part")
raise_no_process_sets = _reject("process sets", "use torch.distributed.new_group and torch's own collectives")
add_process_set = remove_process_set = raise_no_process_sets
run = _reject("run()", "start the script with  paceline launch --ranks N -- python -m paceline.horovod SCRIPT.py")


class ProcessSet:
    """The set of all ranks; no other is supported."""

    process_set_id = 0

    def __init__(self, *ranks: Any) -> None:
        raise_no_process_sets()


global_process_set: ProcessSet = object.__new__(ProcessSet)
AnySet = ProcessSet | None


def require_global_set(process_set: AnySet) -> None:
    if process_set not in (None, global_process_set):
        raise_no_process_sets()


class HorovodInternalError(RuntimeError):
    """Raised by Horovod when a collective fails; here torch's own error is raised instead."""


class _Membership:
    """The rank of this process since `init`, and its process group, which stays until the process ends.

    `shutdown` keeps the group: its rendezvous could not be joined a second time.
    """

    def __init__(self) -> None:
        self.place: RankInfo | None = None
        self.held: ExitStack | None = None
        self.barrier: dist.ProcessGroup | None = None
        """A group of its own, so that a barrier passes while a collective waits for ranks that start it later."""

    def join(self) -> None:
        place = detect_rank(os.environ) or SINGLE_RANK
        if dist.is_initialized():  # by an earlier `init`, or by the script itself
            place = replace(place, rank=dist.get_rank(), world=dist.get_world_size())
        elif self.held is None:
            held, visible = ExitStack(), torch.cuda.device_count()
            own = visible >= place.local_world or (visible == 1 and place.launcher in ("srun", "mpirun"))
            held.enter_context(join_ranks(place, "cuda" if own and visible else "cpu", 0, TIMEOUT_S))
            self.held = held
            atexit.register(self.leave)
            if place.rank == 0:
                started = "" if place is SINGLE_RANK else f", started by {place.launcher}"
                warn(f"paceline.horovod: {plural(place.world, 'rank')}{started}, over torch.distributed")
        if place.world > 1 and self.barrier is None:
            self.barrier = create_subgroup(backend="gloo" if gloo_built() else None)
        self.place = place

    def leave(self) -> None:
        """Leave the group at exit; after a failure, without waiting for the peers."""
        error = getattr(sys, "last_value", None)
        if self.held is not None:
            with suppress(BaseException):
                self.held.__exit__(type(error) if error is not None else None, error, None)


_here = _Membership()
in_flight: dict[str, Any] = {}  # handles of named collectives that have not been waited for


def init(comm: Any = None, process_sets: Sequence[Any] | None = None) -> None:
    """Join the ranks that torchrun, srun, mpirun or `paceline launch` started; alone, a world of one."""
    if comm is not None:
        raise_no_communicators()
    if process_sets:
        raise_no_process_sets()
    if _here.place is None:
        _here.join()


def shutdown() -> None:
    in_flight.clear()
    _here.place = None


def is_initialized() -> bool:
    return _here.place is not None


def place() -> RankInfo:
    if _here.place is None:
        raise UserError("hvd.init() has not been called in this process; call it first")
    return _here.place


def barrier_group() -> dist.ProcessGroup | None:
    return _here.barrier


def barrier(process_set: AnySet = None) -> None:
    require_global_set(process_set)
    if size() > 1:
        dist.barrier(_here.barrier)


def rank() -> int:
    return place().rank


def size() -> int:
    return place().world


def local_rank() -> int:
    return place().local_rank


def local_size() -> int:
    return place().local_world


def cross_rank() -> int:
    """Return the index of this machine."""
    return rank() // local_size()


def cross_size() -> int:
    return -(-size() // local_size())


def nccl_built() -> int:
    """Return 1 if torch was built with NCCL, else 0."""
    return int(dist.is_nccl_available())


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None


def gloo_built() -> bool:
    return dist.is_gloo_available()


gloo_enabled = gloo_built


def mpi_built() -> bool:
    """Return False: ranks started by mpirun use gloo or NCCL."""
    return False


mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = mpi_built
