"""What is asked of Slurm's commands, and their answers as values. Nothing else here talks to a scheduler."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunFailed, UserError
from paceline.io.durations import parse_slurm_time

ANSWER_TIMEOUT_S = 60
"""For an answer of Slurm."""
ACTIVE_STATES = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STOPPED")


@dataclass(frozen=True)
class Partition:
    name: str
    hours: float | None
    """Most that a job may take; None without a limit."""
    nodes: int
    cores: int
    """Of a node, as the rest."""
    memory_mb: int
    gpus: int
    gpu_type: str


@dataclass(frozen=True)
class JobState:
    job: str
    state: str
    reason: str = ""
    start: str = ""
    """Expected or real, as Slurm writes it; empty where it does not know."""
    hosts: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE_STATES


@dataclass(frozen=True)
class SubmittedJob:
    """A job that Slurm has taken; with a dry run, the script that it would have got."""

    run: Path
    """Its folder."""
    file: Path
    """Of the script."""
    script: str
    reasons: tuple[str, ...]
    job: str = ""


def require_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no Slurm here (sbatch is not found): type this on a login node of the cluster, print the "
            "batch script with  --dry-run, or train here with  paceline train"
        )


def list_partitions(loose: bool = False) -> dict[str, Partition]:
    """By name. Where nodes differ, the most that any of them has. `loose`: none where Slurm does not answer."""
    found: dict[str, Partition] = {}
    for line in _run_slurm("sinfo", "--noheader", "--format=%R|%l|%D|%c|%m|%G", loose=loose).splitlines():
        name, limit, nodes, cores, memory, gres = (word.strip() for word in line.split("|", 5))
        kind, gpus = _parse_gres(gres)
        before = found.get(name, Partition(name, parse_slurm_time(limit), 0, 0, 0, 0, ""))
        found[name] = Partition(
            name=name,
            hours=before.hours,
            nodes=before.nodes + _parse_count(nodes),
            cores=max(before.cores, _parse_count(cores)),
            memory_mb=max(before.memory_mb, _parse_count(memory)),
            gpus=max(before.gpus, gpus),
            gpu_type=kind if gpus > before.gpus else before.gpu_type,
        )
    return found


def find_default_partition() -> str | None:
    names = _run_slurm("sinfo", "--noheader", "--format=%P").split()
    return next((name.rstrip("*") for name in names if name.endswith("*")), None)


def submit_script(script: Path) -> str:
    """The id of the new job."""
    answer = _run_slurm("sbatch", "--parsable", str(script)).strip().splitlines()
    job = answer[-1].partition(";")[0] if answer else ""
    if not job.isdecimal():
        raise RunFailed(f"sbatch gave no job id for {script}: {' '.join(answer) or 'no answer'}")
    return job


def fetch_job_states(jobs: Iterable[str], *, sure: bool = False) -> dict[str, JobState]:
    """Of those that Slurm still knows: from the queue, else from the accounts.

    `sure`: where the queue does not answer, that is an error, and no job is taken for one that has ended.
    """
    wanted = list(jobs)
    found: dict[str, JobState] = {}
    if not wanted or shutil.which("squeue") is None:
        return found
    queue = _run_slurm("squeue", "--noheader", "--states=all", "--format=%i|%T|%r|%S|%N", loose=not sure)
    for line in queue.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) == 5 and words[0] in wanted:
            job, state, reason, start, hosts = words
            found[job] = JobState(job, state, "" if reason == "None" else reason, _parse_start(start), hosts)
    missing = [job for job in wanted if job not in found]
    if missing and shutil.which("sacct") is not None:
        listed = _run_slurm(
            "sacct", "-n", "-X", "-P", "-j", ",".join(missing), "-o", "JobID,State,NodeList", loose=True
        )
        for line in listed.splitlines():
            job, state, hosts = (*line.split("|"), "", "")[:3]
            if job in missing:
                found[job] = JobState(job, state.split(" ")[0], hosts=hosts)
    return found


def cancel_jobs(jobs: Sequence[str]) -> None:
    _run_slurm("scancel", *jobs)


def _run_slurm(*command: str, loose: bool = False) -> str:
    """What a command prints. `loose`: an answer that does not come is empty."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not found: is this a login node of the cluster?") from None
    except subprocess.TimeoutExpired:
        if loose:
            return ""
        raise RunFailed(f"{command[0]} did not answer within {ANSWER_TIMEOUT_S} s; is slurmctld down?") from None
    if done.returncode == 0 or loose:
        return done.stdout
    why = done.stderr.strip().splitlines() or [f"{command[0]} ended with exit code {done.returncode}"]
    if command[0] in ("sinfo", "squeue"):
        raise UserError(f"Slurm does not answer here ({why[-1]}); type this on a login node of the cluster")
    raise UserError(f"Slurm refused: {' '.join(' '.join(why).split())}")


def _parse_gres(gres: str) -> tuple[str, int]:
    """`gpu:a100:4(S:0-1),fs:1` is (a100, 4)."""
    kind, most = "", 0
    for word in re.sub(r"\([^()]*\)", "", gres).split(","):
        match re.split(":", word):
            case ["gpu", count] if count.isdecimal():
                kind, most = ("", int(count)) if int(count) > most else (kind, most)
            case ["gpu", name, count] if count.isdecimal():
                kind, most = (name, int(count)) if int(count) > most else (kind, most)
    return kind, most


def _parse_count(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _parse_start(start: str) -> str:
    return "" if start in ("N/A", "") else start
