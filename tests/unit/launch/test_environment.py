"""Reading our place from the environment: the variables below were copied from real launchers."""

import pickle

import pytest

from paceline.errors import InternalError, OutOfMemory, RunFailed, UserError
from paceline.launch.environment import RankInfo, detect_rank, parse_first_host, parse_task_counts
from paceline.launch.root_cause import RankFailure, describe_exception, describe_exit, find_root_cause, is_secondary
from results import expect_error


def env(text):
    return dict(word.split("=") for word in text.split())


TORCHRUN = env("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=41234")
BATCH_SCRIPT = env(  # sbatch -N2 -n4, before any srun
    """SLURM_JOB_ID=7162390 SLURM_JOB_NODELIST=n[1-2] SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NPROCS=4 SLURM_NTASKS=4
    SLURM_PROCID=0 SLURM_TASKS_PER_NODE=3,1"""
)
STEP = BATCH_SCRIPT | env(  # srun -n3 -N2 inside it, the last task
    """SLURM_DISTRIBUTION=block SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=2
    SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1"""
)
ONE_NODE_STEP = STEP | env("SLURM_NODEID=0 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=3")
SHELL = BATCH_SCRIPT | env("SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1")
OPEN_MPI = env(
    """OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    PMIX_NAMESPACE=2048655361 PMIX_RANK=1"""
)
SPREAD_MPI = OPEN_MPI | env("OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1")
MPICH = env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=8")
MPICH_IN_SLURM = STEP | env(  # one task per node carries the ranks of that node
    """PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=1(x2)"""
)

PLACES = {
    "torchrun": (TORCHRUN, RankInfo(3, 4, 1, 2, "torchrun", "n1", 41234)),
    "our own ranks": (TORCHRUN | {"PACELINE_LAUNCHER": "paceline"}, RankInfo(3, 4, 1, 2, "paceline", "n1", 41234)),
    "torchrun inside srun": (STEP | TORCHRUN, RankInfo(3, 4, 1, 2, "torchrun", "n1", 41234)),
    "srun": (STEP, RankInfo(2, 3, 0, 1, "srun", "n1", 27717)),
    "srun on one node": (ONE_NODE_STEP, RankInfo(2, 3, 2, 3, "srun", "127.0.0.1", 27717)),
    "srun with a chosen master": (
        STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "29400", "WORLD_SIZE": "3"},
        RankInfo(2, 3, 0, 1, "srun", "head", 29400),
    ),
    "srun --mpi=pmi2": (STEP | {"PMI_RANK": "2", "PMI_SIZE": "3"}, RankInfo(2, 3, 0, 1, "srun", "n1", 27717)),
    "mpirun": (OPEN_MPI, RankInfo(1, 2, 1, 2, "mpirun", "127.0.0.1", 20640)),
    "mpirun on two machines": (SPREAD_MPI | {"MASTER_ADDR": "a"}, RankInfo(1, 2, 0, 1, "mpirun", "a", 20640)),
    "mpirun in a Slurm job": (SPREAD_MPI | BATCH_SCRIPT, RankInfo(1, 2, 0, 1, "mpirun", "n1", 20640)),
    "mpich": (MPICH, RankInfo(1, 2, 1, 2, "mpirun", "127.0.0.1", 29500)),
    "mpich in a Slurm job": (MPICH_IN_SLURM, RankInfo(3, 4, 0, 1, "mpirun", "n1", 29500)),
    "nothing": ({}, None),
    "only an address": ({"MASTER_ADDR": "n1", "MASTER_PORT": "1"}, None),
    "a batch script": (BATCH_SCRIPT, None),
    "a shell under srun": (SHELL, None),
}

CONTRADICTIONS = {
    "no world": ({"RANK": "0"}, "WORLD_SIZE"),
    "no local world": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
    "no address": ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR"),
    "a world without rank": ({"WORLD_SIZE": "4"}, "WORLD_SIZE"),
    "a word": (TORCHRUN | {"RANK": "first"}, "RANK"),
    "negative": (TORCHRUN | {"RANK": "-1"}, "RANK"),
    "rank beyond": (TORCHRUN | {"RANK": "4"}, "RANK"),
    "local rank beyond": (TORCHRUN | {"LOCAL_RANK": "2"}, "RANK"),
    "local world beyond": (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "RANK"),
    "no port": (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT"),
    "port too large": (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT"),
    "slurm counts": (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "SLURM_STEP_NUM_TASKS"),
    "slurm rank beyond": (STEP | {"SLURM_PROCID": "3"}, "SLURM_PROCID"),
    "slurm arbitrary": (STEP | {"SLURM_DISTRIBUTION": "arbitrary"}, "MASTER_ADDR"),
    "mpi rank beyond": (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK"),
    "mpi without size": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
    "mpi somewhere": (SPREAD_MPI, "MASTER_ADDR"),
    "mpich somewhere": (MPICH | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, "MASTER_ADDR"),
}

FIRST_HOSTS = env(
    "n1=n1 n[1-3,7],m2=n1 gpu[008-011]=gpu008 a,b[1,03],c=a r[1-2]n[3-4].cluster=r1n3.cluster n[07]=n07"
    " node-7,node[10-11]-ib=node-7"
)


@pytest.mark.parametrize(("environ", "place"), PLACES.values(), ids=PLACES)
def test_place(environ, place):
    assert detect_rank(environ) == place


@pytest.mark.parametrize(("environ", "variable"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradiction_names_the_variable(environ, variable):
    with pytest.raises(UserError) as error:
        detect_rank(environ)
    assert error.value.key == variable


def test_ports_differ_between_steps_and_jobs():
    jobs = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("100", "101") for step in "012"]
    places = [detect_rank(STEP | job) for job in jobs]
    assert len({place.port for place in places if place}) == len(jobs)


def test_lists_of_nodes_and_of_tasks():
    assert {text: parse_first_host(text) for text in FIRST_HOSTS} == FIRST_HOSTS
    assert [parse_task_counts(text) for text in ("2(x3),1", "4")] == [[2, 2, 2, 1], [4]]


NODES, TASKS = ("", "n[", "n]1", "n[1-", "n[a-b]", "n[]", ",n1"), ("", "2(3)", "x", "2,,1")


@pytest.mark.parametrize(
    ("parse", "text"), [*((parse_first_host, t) for t in NODES), *((parse_task_counts, t) for t in TASKS)]
)
def test_unreadable_lists(parse, text):
    with expect_error("unavailable"):
        parse(text)


def chained(outer, inner):
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4242"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), True),
        (chained(KeyError("step"), RuntimeError("Connection reset by peer")), True),
        (chained(RuntimeError("Connection reset by peer"), KeyError("step")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("while reading the data set"), False),
        (UserError("train.lr is negative"), False),
    ],
)
def test_echo(error, echo):
    assert is_secondary(error) is echo


def test_root_cause_is_the_earliest_failure_that_is_not_secondary():
    echo = RankFailure(0, RunFailed("closed by peer"), 1.0, secondary=True)
    late = RankFailure(2, RunFailed("ValueError"), 3.0, secondary=False)
    assert find_root_cause([echo, late]) is late
    assert find_root_cause([echo]) is echo
    early = RankFailure(1, RunFailed("disk full"), 2.0, secondary=False)
    assert find_root_cause([echo, late, early]) is early
    killed = describe_exit(3, -9, 2.1, secondary=False)  # noticed after the complaint of a peer that we could not read
    assert find_root_cause([echo, late, early, killed]) is killed


def test_errors_that_the_launcher_raises():
    wrong = describe_exception(1, UserError("train.lr: no", code="invalid-value", key="train.lr")).error
    assert (type(wrong), str(wrong), wrong.code, wrong.key) == (UserError, "train.lr: no", "invalid-value", "train.lr")
    failed = describe_exception(1, RunFailed("another rank failed")).error
    assert (type(failed), str(failed)) == (RunFailed, "rank 1: another rank failed")
    assert isinstance(describe_exception(1, OutOfMemory("there is no memory")).error, OutOfMemory)
    bug = pickle.loads(pickle.dumps(describe_exception(3, KeyError("x")))).error
    assert (type(bug), bug.exit_code, bug.traceback) == (InternalError, 70, "KeyError: 'x'\n")
    killed = describe_exit(1, -9, 0.0, False).error
    assert (type(killed), killed.certain) == (OutOfMemory, False)
    said = [str(describe_exit(0, code, 0.0, False).error) for code in (-15, -60, 3)]
    assert [words.rpartition(" by ")[2] for words in said[:2]] == ["SIGTERM", "signal 60"]
    assert "exit code 3" in said[2]
