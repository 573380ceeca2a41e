"""Read this process's rank from the variables that torchrun, srun, mpirun or Paceline have set.

None of them changes what a run computes.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from paceline.errors import UserError

LOCALHOST = "127.0.0.1"
LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"  # set in ranks that Paceline starts itself
DEFAULT_PORT = 29500
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI_VARIABLES = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class RankInfo:
    """Which rank this process is, who started it, and where rank 0 listens."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    launcher: str  # paceline, torchrun, srun, mpirun or alone
    address: str
    port: int

    @property
    def on_one_machine(self) -> bool:
        return self.local_world == self.world


SINGLE_RANK = RankInfo(rank=0, world=1, local_rank=0, local_world=1, launcher="alone", address=LOCALHOST, port=0)


def detect_rank(environ: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that a launcher gave to this process, or None if there is no launcher.

    Launchers nest, so the innermost is asked first. `srun --mpi=pmi2` sets PMI_RANK, but not MPI_LOCALRANKID.
    """
    if "RANK" in environ:
        return _from_torchrun(environ)
    if OPEN_MPI_VARIABLES[0] in environ:
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        port = _derive_port(job) if job else DEFAULT_PORT
        return _from_mpirun(environ, OPEN_MPI_VARIABLES, port, "-x MASTER_ADDR=HOST_OF_RANK_0")
    if "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ:
        return _from_mpirun(environ, MPICH_VARIABLES, DEFAULT_PORT, "-genv MASTER_ADDR HOST_OF_RANK_0")
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and (info := _from_srun(environ)) is not None:
        return info
    if environ.get("WORLD_SIZE", "1") != "1":
        message = f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but no launcher started this process, as RANK is not set"
        raise _environment_error("WORLD_SIZE", f"{message}; type  unset WORLD_SIZE  to start the ranks here")
    return None


def isolate_rank() -> AbstractContextManager[None]:
    """Set the environment of a single rank while entered, whatever its launcher has started."""
    place = dict(zip(RANK_VARIABLES, "0101", strict=True))
    return set_environment({**place, "MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(DEFAULT_PORT)})


@contextmanager
def set_environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, or unset those that are None, while entered."""
    before = {name: os.environ.get(name) for name in variables}
    _assign_variables(variables)
    try:
        yield
    finally:
        _assign_variables(before)


def _assign_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _from_torchrun(environ: Mapping[str, str]) -> RankInfo:
    remedy = "start with  torchrun --nproc-per-node N …  or type  unset RANK"
    numbers = _parse_numbers(environ, RANK_VARIABLES, remedy)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise _environment_error(name, f"RANK={environ['RANK']} is set, but {name} is not; {remedy}")
    launcher = environ.get(LAUNCHER_VARIABLE, "torchrun")
    return _build_info(environ, RANK_VARIABLES, numbers, launcher, environ["MASTER_ADDR"], 0)


def _from_mpirun(environ: Mapping[str, str], names: Sequence[str], port: int, address_option: str) -> RankInfo:
    numbers = _parse_numbers(environ, names, "start with  mpirun -np N …")
    _, world, _, local_world = numbers
    address = environ.get("MASTER_ADDR") or (LOCALHOST if local_world == world else "")
    if not address and environ.get("SLURM_JOB_NODELIST"):
        address = parse_first_host(environ["SLURM_JOB_NODELIST"])
    if not address:
        message = f"mpirun spread {world} ranks over several machines without the address of rank 0; "
        raise _environment_error("MASTER_ADDR", f"{message}start with  mpirun {address_option} …")
    return _build_info(environ, names, numbers, "mpirun", address, port)


def _from_srun(environ: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of a task of a Slurm step; None for a step of one task, which is a shell (`srun --pty bash`)."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    remedy = "start with  srun --ntasks N …"
    rank, world, local_rank = _parse_numbers(environ, names, remedy)
    if world == 1:
        return None
    (node,) = _parse_numbers(environ, ("SLURM_NODEID",), remedy)
    counts = parse_task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(counts) != world or node >= len(counts):
        raise _contradiction_error(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"))
    address = environ.get("MASTER_ADDR") or (LOCALHOST if len(counts) == 1 else "")
    if not address:
        address = parse_first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    port = _derive_port(f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}")
    return _build_info(environ, names, (rank, world, local_rank, counts[node]), "srun", address, port)


def _derive_port(job: str) -> int:
    """Return the same port on every rank of a job and, almost always, another one for another job."""
    return 20_000 + zlib.crc32(job.encode()) % 10_000  # below the ports that Linux gives to outgoing connections


def _parse_numbers(environ: Mapping[str, str], names: Sequence[str], remedy: str) -> tuple[int, ...]:
    for name in names:
        if not environ.get(name, "").isdecimal():
            raise _environment_error(name, f"{name}={environ.get(name, '')} is not a number; {remedy}")
    return tuple(int(environ[name]) for name in names)


def _build_info(
    environ: Mapping[str, str], names: Sequence[str], numbers: Sequence[int], launcher: str, address: str, port: int
) -> RankInfo:
    rank, world, local_rank, local_world = numbers
    if not rank < world or not local_rank < local_world <= world:
        raise _contradiction_error(environ, names)
    if text := environ.get("MASTER_PORT"):
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise _environment_error("MASTER_PORT", f"MASTER_PORT={text} is not a port; use a number from 1 to 65535")
        port = int(text)
    return RankInfo(rank, world, local_rank, local_world, launcher, address, port)


def _contradiction_error(environ: Mapping[str, str], names: Sequence[str]) -> UserError:
    given = ", ".join(f"{name}={environ.get(name, '')}" for name in names)
    message = f"{given} contradict each other: ranks count from 0 and stay below their total"
    return UserError(message, code="conflict", key=names[0])


def _environment_error(name: str, message: str) -> UserError:
    return UserError(message, code="unavailable", key=name)


def parse_first_host(text: str) -> str:
    """Return the first host of a Slurm node list: `n01` of `n[01-03,7],m2`."""
    first = re.split(r",(?![^\[]*\])", text)[0]  # at commas outside brackets
    host = re.sub(r"\[(\d+)(?:[-,][\d,-]*)?\]", r"\1", first)
    if not host or "[" in host or "]" in host:
        raise _environment_error("SLURM_JOB_NODELIST", f"{text!r} is not a node list such as  n[1-3,7],m2")
    return host


def parse_task_counts(text: str) -> list[int]:
    """Return the tasks on each node of a Slurm step: [2, 2, 2, 1] for `2(x3),1`."""
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", word)
        if match is None:
            message = f"{text!r} is not a list of task counts such as  2(x3),1"
            raise _environment_error("SLURM_STEP_TASKS_PER_NODE", message)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


@contextmanager
def pin_cores(info: RankInfo, threads: int) -> Iterator[None]:
    """Pin this thread, and those that it starts, to this rank's share of the cores, if the ranks use all of them.

    A rank that slept while waiting for its peers is otherwise often woken on the core of a running one, and both wait.
    """
    before = os.sched_getaffinity(0)
    if info.local_world == 1 or len(before) != threads * info.local_world:
        yield
        return
    first = threads * info.local_rank
    os.sched_setaffinity(0, sorted(before)[first : first + threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
