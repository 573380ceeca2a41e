"""Reading our place from the environment: the variables below were copied from real launchers."""

import pickle
from pathlib import Path

import pytest
import yaml

from paceline.errors import InternalError, OutOfMemory, RunFailed, UserError
from paceline.launch.environment import RankInfo, detect_rank, parse_first_host, parse_task_counts
from paceline.launch.root_cause import RankFailure, describe_exception, describe_exit, find_root_cause, is_secondary
from results import expect_error


def env(text):
    return dict(word.split("=") for word in text.split())


TABLES = yaml.safe_load(Path(__file__).with_name("environments.yaml").read_text(encoding="utf-8"))
VARIABLES = {name: env(text) for name, text in TABLES["variables"].items()}


def build_environ(names, more):
    return {key: value for known in (*(VARIABLES[name] for name in names), env(more)) for key, value in known.items()}


FIRST_HOSTS = env(
    "n1=n1 n[1-3,7],m2=n1 gpu[008-011]=gpu008 a,b[1,03],c=a r[1-2]n[3-4].cluster=r1n3.cluster n[07]=n07"
    " node-7,node[10-11]-ib=node-7"
)


@pytest.mark.parametrize("name", TABLES["places"])
def test_place(name):
    *environ, place = TABLES["places"][name]
    assert detect_rank(build_environ(*environ)) == (place and RankInfo(*place))


@pytest.mark.parametrize("name", TABLES["contradictions"])
def test_contradiction_names_the_variable(name):
    *environ, variable = TABLES["contradictions"][name]
    with pytest.raises(UserError) as error:
        detect_rank(build_environ(*environ))
    assert error.value.key == variable


def test_ports_differ_between_steps_and_jobs():
    jobs = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("100", "101") for step in "012"]
    places = [detect_rank(VARIABLES["step"] | job) for job in jobs]
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
