"""What the tests of this folder ask of a run: commands as a user types them, and answers to compare."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from slurm_lab import until

import paceline
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from results import losses

RUN = Path("runs/line")
LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "hsdp, sharded inside of a node": {"strategy": "hsdp", "replicate": 2},
    "tensor inside, data between": {"strategy": "ddp", "tensor": 2},
}
"""Of four ranks on two nodes."""


def paceline_says(*words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def submitted(*words: str) -> str:
    found = re.search(r"^job (\d+)", paceline_says("submit", *words), re.MULTILINE)
    assert found
    return found[1]


def step(run: Path = RUN) -> int:
    """That the main rank has written last."""
    return max((event["step"] for event in read_events(RunDir(run).events_file(0), "step")), default=0)


def ended(run: Path = RUN) -> list[dict[str, Any]]:
    """What the folder said after each attempt."""
    return list(read_events(RunDir(run).jobs_file, "ended"))


def endings(run: Path = RUN) -> list[str]:
    return [record["next"] for record in ended(run)]


def until_ended(lab, job: str, timeout_s: float = 180) -> str:
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    until(f"job {job} has ended", lambda: lab.hurry(job) or lab.state(job) in over, timeout_s)
    return lab.state(job)


def weights(run: Path = RUN) -> dict[str, torch.Tensor]:
    return paceline.train(run / "spec.yaml", resume=run, resume_or_start=True, show=False).weights()


def undisturbed(run_file: Path, ranks: int) -> dict[str, torch.Tensor]:
    spec = paceline.load(run_file, [f"parallel.ranks={ranks}", "data.step_s=0"])
    return paceline.train(spec, Path("alone"), show=False).weights()


def says_the_same(result: paceline.RunResult, alone: paceline.RunResult) -> None:
    assert losses(result) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = alone.weights(), result.weights()
    for name in ours:
        assert torch.dist(ours[name], theirs[name]) <= 1e-5 * ours[name].norm() + 1e-5, name


def differ(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
