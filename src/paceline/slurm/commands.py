"""Run Slurm's commands and parse their output; nothing else talks to a scheduler."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from paceline.errors import RunFailed, UserError
from paceline.io.arguments import parse_slurm_time

ANSWER_TIMEOUT_S = 60
ACTIVE_STATES = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STOPPED")


@dataclass(frozen=True)
class Partition:
    name: str
    hours: float | None
    nodes: int
    memory_mb: int
    gpus: int
    gpu_type: str
    cores: int = 0


@dataclass(frozen=True)
class JobState:
    job: str
    state: str
    reason: str = ""
    start: str = ""
    """Expected or actual, as Slurm writes it; "" if unknown."""
    hosts: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE_STATES


@dataclass(frozen=True)
class SubmittedJob:
    run: Path
    file: Path
    script: str
    reasons: tuple[str, ...]
    job: str = ""


def require_slurm() -> None:
    if shutil.which("sbatch") is None:
        message = "there is no Slurm here (sbatch is not found): type this on a login node of the cluster, print the "
        message += "batch script with  --dry-run, or train here with  paceline train"
        raise UserError(message, code="unavailable")


def list_partitions(loose: bool = False) -> dict[str, Partition]:
    """Return the partitions by name, with the most that any of their nodes has; `loose`: {} if Slurm fails."""
    found: dict[str, Partition] = {}
    for line in run_slurm("sinfo", "--noheader", "--format=%R|%l|%D|%m|%G|%c", loose=loose).splitlines():
        name, limit, nodes, memory, gres, cores = (word.strip() for word in f"{line}|".split("|")[:6])
        kind, gpus = _parse_gres(gres)
        known = found.get(name, Partition(name, parse_slurm_time(limit), 0, 0, 0, ""))
        if gpus > known.gpus:
            known = replace(known, gpus=gpus, gpu_type=kind)
        memory_mb = max(known.memory_mb, _parse_count(memory))
        known = replace(known, memory_mb=memory_mb, cores=max(known.cores, _parse_count(cores)))
        found[name] = replace(known, nodes=known.nodes + _parse_count(nodes))
    return found


def find_default_partition() -> str | None:
    names = run_slurm("sinfo", "--noheader", "--format=%P").split()
    return next((name.rstrip("*") for name in names if name.endswith("*")), None)


def submit_script(script: Path) -> str:
    answer = run_slurm("sbatch", "--parsable", str(script)).strip().splitlines()
    job = answer[-1].partition(";")[0] if answer else ""
    if not job.isdecimal():
        raise RunFailed(f"sbatch gave no job id for {script}: {' '.join(answer) or 'no answer'}", code="unavailable")
    return job


def predict_start(script: str) -> datetime:
    """Return when the scheduler expects a batch script to start; nothing is submitted."""
    answer = run_slurm("sbatch", "--test-only", given=script)
    found = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", answer)
    if found is None:
        raise RunFailed(f"sbatch --test-only named no start: {answer.strip() or 'no answer'}", code="unavailable")
    return datetime.fromisoformat(found[1])


def fetch_job_states(jobs: Iterable[str], *, sure: bool = False) -> dict[str, JobState]:
    """Return the states of the jobs that Slurm knows, from the queue or else from accounting.

    `sure`: raise if the queue does not answer, so that no job is taken for one that has ended.
    """
    wanted = list(jobs)
    found: dict[str, JobState] = {}
    if not wanted or shutil.which("squeue") is None:
        return found
    queue = run_slurm("squeue", "--noheader", "--states=all", "--format=%i|%T|%r|%S|%N", loose=not sure)
    for line in queue.splitlines():
        words = ["" if word.strip() in ("None", "N/A") else word.strip() for word in line.split("|")]
        if len(words) == 5 and words[0] in wanted:
            found[words[0]] = JobState(*words)
    missing = [job for job in wanted if job not in found]
    if missing and shutil.which("sacct") is not None:
        columns = ("-n", "-X", "-P", "-o", "JobID,State,NodeList")
        for line in run_slurm("sacct", *columns, "-j", ",".join(missing), loose=True).splitlines():
            job, state, hosts = (*line.split("|"), "", "")[:3]
            if job in missing:
                found[job] = JobState(job, state.split(" ")[0], hosts=hosts)
    return found


def run_slurm(*command: str, loose: bool = False, given: str | None = None) -> str:
    """Return what a command prints, on both streams if it is `given` a script; `loose`: "" if it fails."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
            input=given,
        )
    except FileNotFoundError:
        raise UserError(f"{name} is not found: is this a login node of the cluster?", code="unavailable") from None
    except subprocess.TimeoutExpired:
        if loose:
            return ""
        message = f"{name} did not answer within {ANSWER_TIMEOUT_S} s; is slurmctld down?"
        raise RunFailed(message, code="unavailable") from None
    if done.returncode == 0 or loose:
        return done.stdout if given is None else done.stdout + done.stderr
    lines = done.stderr.strip().splitlines() or [f"{name} ended with exit code {done.returncode}"]
    if name in ("sinfo", "squeue"):
        message = f"Slurm does not answer here ({lines[-1]}); type this on a login node of the cluster"
        raise UserError(message, code="unavailable")
    raise UserError(f"Slurm rejected it: {' '.join(' '.join(lines).split())}", code="invalid-request")


def _parse_gres(gres: str) -> tuple[str, int]:
    """Return (a100, 4) for `gpu:a100:4(S:0-1),fs:1`."""
    found = re.findall(r"(?:^|,)gpu:(?:([^:,]+):)?(\d+)(?=,|$)", re.sub(r"\([^()]*\)", "", gres))
    return max(((kind, int(count)) for kind, count in found), key=lambda one: one[1], default=("", 0))


def _parse_count(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0
