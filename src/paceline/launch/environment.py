"""Read this process's rank from the variables that its launcher has set.

Nobody has to say how a run was started: the same command works under torchrun, srun and mpirun, and on its own.
These variables say where a rank is; none of them changes what a run computes.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.errors import UserError

LOCALHOST = "127.0.0.1"
LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"  # set in the ranks that we start ourselves
DEFAULT_PORT = 29500  # where a launcher gives its ranks nothing in common to derive one from
MAX_HOSTS = 65536


@dataclass(frozen=True)
class RankInfo:
    rank: int
    world: int
    local_rank: int
    local_world: int
    launcher: str  # paceline | torchrun | srun | mpirun | alone
    address: str  # of rank 0
    port: int


SINGLE_RANK = RankInfo(rank=0, world=1, local_rank=0, local_world=1, launcher="alone", address=LOCALHOST, port=0)


def detect_rank(environ: Mapping[str, str]) -> RankInfo | None:
    """The place that a launcher gave to this process; None when there is no launcher, so that we may start ranks.

    Launchers nest (sbatch around mpirun around nothing, srun around torchrun), so the innermost is asked first.
    `srun --mpi=pmi2` sets PMI_RANK as MPICH and Intel MPI do, but not MPI_LOCALRANKID: that one is srun's.
    """
    if "RANK" in environ:
        return _from_torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        names = tuple(f"OMPI_COMM_WORLD_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        return _from_mpirun(environ, names, _derive_port(job) if job else DEFAULT_PORT, "-x MASTER_ADDR=HOST_OF_RANK_0")
    if "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return _from_mpirun(environ, names, DEFAULT_PORT, "-genv MASTER_ADDR HOST_OF_RANK_0")
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and (place := _from_srun(environ)) is not None:
        return place
    if environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but RANK is not, and neither torchrun, srun nor mpirun "
            "started this process; type  unset WORLD_SIZE  to start the ranks here"
        )
    return None


@contextmanager
def isolate_rank() -> Iterator[None]:
    """While entered, this process stands alone, whatever its launcher has started."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    changed = {**alone, "MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(DEFAULT_PORT)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _from_torchrun(environ: Mapping[str, str]) -> RankInfo:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    remedy = "start with  torchrun --nproc-per-node N …  or type  unset RANK"
    numbers = _parse_numbers(environ, names, remedy)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise UserError(f"RANK={environ['RANK']} is set, but {name} is not; {remedy}")
    return _build_rank_info(
        environ,
        names,
        numbers,
        environ.get(LAUNCHER_VARIABLE, "torchrun"),
        environ["MASTER_ADDR"],
        _parse_port(environ, 0),
    )


def _from_mpirun(environ: Mapping[str, str], names: Sequence[str], port: int, option: str) -> RankInfo:
    """`option`: how this one is told where rank 0 is."""
    numbers = _parse_numbers(environ, names, "start with  mpirun -np N …")
    port = _parse_port(environ, port)
    _, world, _, local_world = numbers
    if environ.get("MASTER_ADDR"):
        address = environ["MASTER_ADDR"]
    elif local_world == world:
        address = LOCALHOST
    elif environ.get("SLURM_JOB_NODELIST"):
        address = parse_node_list(environ["SLURM_JOB_NODELIST"])[0]
    else:
        raise UserError(
            f"mpirun spread {world} ranks over several machines ({local_world} on this one) and did not say where "
            f"rank 0 is; start with  mpirun {option} …"
        )
    return _build_rank_info(environ, names, numbers, "mpirun", address, port)


def _from_srun(environ: Mapping[str, str]) -> RankInfo | None:
    """A task of a Slurm step. A batch script has SLURM_PROCID=0 as well, but no step; a step of one task is a shell
    (`srun --pty bash`, salloc) in which the user expects to be as free as on a workstation."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    remedy = "start with  srun --ntasks N …"
    rank, world, local_rank = _parse_numbers(environ, names, remedy)
    if world == 1:
        return None
    (node,) = _parse_numbers(environ, ("SLURM_NODEID",), remedy)
    counts = parse_task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(counts) != world or node >= len(counts):
        raise _contradiction_error(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"))
    if environ.get("MASTER_ADDR"):
        address = environ["MASTER_ADDR"]
    elif len(counts) == 1:
        address = LOCALHOST
    elif environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        raise UserError(
            "srun --distribution=arbitrary places rank 0 on any node and does not say on which; "
            "type  export MASTER_ADDR=HOST_OF_RANK_0  before srun"
        )
    else:
        address = parse_node_list(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))[0]
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    numbers = (rank, world, local_rank, counts[node])
    return _build_rank_info(environ, names, numbers, "srun", address, _parse_port(environ, _derive_port(step)))


def _derive_port(job: str) -> int:
    """The same port on every rank of a job and, almost always, another one for another job on the same node."""
    return 20_000 + zlib.crc32(job.encode()) % 10_000  # below the ports that Linux gives to outgoing connections


def _parse_port(environ: Mapping[str, str], otherwise: int) -> int:
    text = environ.get("MASTER_PORT")
    if not text:
        return otherwise
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UserError(f"MASTER_PORT={text} is not a port; use a number from 1 to 65535")
    return int(text)


def _parse_numbers(environ: Mapping[str, str], names: Sequence[str], remedy: str) -> tuple[int, ...]:
    for name in names:
        if not environ.get(name):
            given = next((other for other in names if environ.get(other)), "")
            because = f"{given}={environ[given]} is set, but {name} is not" if given else f"{name} is not set"
            raise UserError(f"{because}; {remedy}")
        if not environ[name].isdecimal():
            raise UserError(f"{name}={environ[name]} is not a number; {remedy}")
    return tuple(int(environ[name]) for name in names)


def _build_rank_info(
    environ: Mapping[str, str], names: Sequence[str], numbers: Sequence[int], launcher: str, address: str, port: int
) -> RankInfo:
    rank, world, local_rank, local_world = numbers
    if not rank < world or not local_rank < local_world <= world:
        raise _contradiction_error(environ, names)
    return RankInfo(rank, world, local_rank, local_world, launcher, address, port)


def _contradiction_error(environ: Mapping[str, str], names: Sequence[str]) -> UserError:
    given = ", ".join(f"{name}={environ.get(name, '')}" for name in names)
    return UserError(f"{given} contradict each other: ranks count from 0 and stay below their total")


def parse_node_list(text: str) -> list[str]:
    """The host names of a Slurm node list, `n[01-03,7],m2`, in order; a range keeps the zeros it is written with."""
    found: list[str] = []
    for word in re.split(r",(?![^\[]*\])", text):  # at the commas outside brackets
        parts = re.split(r"\[([^\[\]]*)\]", word)  # prefix, ranges, middle, ranges, …, suffix
        if any("[" in part or "]" in part for part in parts) or not word:
            raise _node_list_error(text)
        choices = [[part] if index % 2 == 0 else _expand_ranges(part, text) for index, part in enumerate(parts)]
        found += map("".join, itertools.product(*choices))
        if len(found) > MAX_HOSTS:
            raise UserError(f"node list {text!r} names more than {MAX_HOSTS} hosts")
    return found


def parse_task_counts(text: str) -> list[int]:
    """Tasks on each node of a Slurm step: `2(x3),1` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            raise UserError(f"{text!r} is not a list of task counts such as  2(x3),1")
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_HOSTS)
    return counts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for span in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if match is None:
            raise _node_list_error(text)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise _node_list_error(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _node_list_error(text: str) -> UserError:
    return UserError(f"{text!r} is not a node list such as  n[1-3,7],m2")


@contextmanager
def pin_cores(place: RankInfo, threads: int) -> Iterator[None]:
    """Keep this thread, and those that it starts, on this rank's share of the cores, where the ranks take all of them.

    A rank that has slept for its peers is else often woken on the core of one that runs, and both wait. Where cores are
    left over, or srun or mpirun has bound the ranks, nothing is changed.
    """
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if place.local_world == 1 or len(before) != threads * place.local_world:
        yield
        return
    first = threads * place.local_rank
    os.sched_setaffinity(0, sorted(before)[first : first + threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
