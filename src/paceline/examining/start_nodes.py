"""Nodes named by the user: the doctor is started on each of them, as one rank, and the first tells what was found."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.examining.results import CheckResult, Examination, Health

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
ENOUGH_S = 240.0
PASSED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""Variables that the other nodes are given as they are here."""


@dataclass(frozen=True)
class Answer:
    """What became of the doctor on one node."""

    host: str
    code: int
    out: str
    err: str


def examine_nodes(nodes: Sequence[str], words: Sequence[str], out: Path, by: str = SSH) -> Examination:
    """`by` starts a command on a host, which is its last word: ssh, or what does the same."""
    if len(nodes) < 2 or len(set(nodes)) < len(nodes):
        raise UserError(f"--nodes {','.join(nodes)}: give two or more different hosts, as in  --nodes n1,n2")
    if bad := next((node for node in nodes if not node or node.startswith("-") or not node.isprintable()), None):
        raise UserError(f"--nodes: {bad!r} is not the name of a host")
    start = _words(by)
    port, began = 20_000 + secrets.randbelow(10_000), time.perf_counter()
    started = []
    for rank, node in enumerate(nodes):
        command = _command(rank, nodes, port, words, out)
        try:
            started.append(
                subprocess.Popen(
                    _there(start, node, command),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        except OSError as error:
            raise UserError(f"--by {by}: cannot be started: {error.strerror}") from None
    answers = [_answer(node, process) for node, process in zip(nodes, started, strict=True)]
    return _examination(answers, time.perf_counter() - began, "ssh" if by == SSH else by)


def _command(rank: int, nodes: Sequence[str], port: int, words: Sequence[str], out: Path) -> list[str]:
    place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(nodes), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": nodes[0], "MASTER_PORT": port}
    known = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    variables = [f"{name}={value}" for name, value in {**known, **place}.items()]
    run = [str(Path(words[0]).absolute()), *words[1:]] if words else []
    return ["env", *variables, sys.executable, "-m", "paceline", "doctor", *run, "--out", str(out.absolute()), "--json"]


def _words(by: str) -> list[str]:
    try:
        words = shlex.split(by)
    except ValueError:
        words = []
    if not words:
        raise UserError(f"--by {by!r}: this is not a command; write it as  --by 'ssh -p 2222'")
    return words


def _there(start: Sequence[str], node: str, command: Sequence[str]) -> list[str]:
    """ssh hands its words to a shell on the other side."""
    return [*start, node, shlex.join(command)] if Path(start[0]).name == "ssh" else [*start, node, *command]


def _answer(node: str, process: subprocess.Popen[str]) -> Answer:
    try:
        out, err = process.communicate(timeout=ENOUGH_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nnot done within {ENOUGH_S:.0f} s"
    return Answer(node, process.returncode, out, err)


def _examination(answers: Sequence[Answer], seconds: float, by: str = "ssh") -> Examination:
    """That of the first node; what others could not tell it is added."""
    found: list[CheckResult] = []
    hosts: Sequence[str] = [answer.host for answer in answers]
    for index, answer in enumerate(answers):
        if index and answer.code == 0 and not answer.out:
            continue  # told to the first
        try:
            values = json.loads(answer.out)
            told = [CheckResult(**{**one, "verdict": Health(one["verdict"])}) for one in values["findings"]]
            theirs = list(map(str, values["hosts"]))
        except (ValueError, KeyError, TypeError, RecursionError):  # of another version, or what a shell there prints
            why = next((line.strip() for line in reversed(answer.err.splitlines()) if line.strip()), "no answer")
            remedy = f"{by} {answer.host} {sys.executable} -m paceline --version"
            what = "an answer of the doctor there"
            found.append(
                CheckResult("nodes", "start", f"{answer.host}: {why}", what, Health.WRONG, remedy, answer.host)
            )
            continue
        found += told if index == 0 else [finding for finding in told if finding.verdict is Health.WRONG]
        hosts = theirs if index == 0 and len(theirs) == len(answers) else hosts
    return Examination(found, seconds, hosts)
