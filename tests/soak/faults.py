"""Faults in running trainings: which there are, when they strike, and what must hold afterwards."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.record.run_dir import RunDir

SOURCES = Path(__file__).resolve().parents[2] / "src"
HERE = Path(__file__).resolve().parent
TIMEOUT_S = 15
"""parallel.timeout_s of the runs."""
GRACE_S = 10
"""After a rank was frozen, a run ends within so much more."""
PATIENCE_S = 300
"""For what takes no time on a machine that is idle."""

OWN = """
import numpy as np
import torch
from paceline import Workload


class Line(Workload):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def data(self, split):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((64, 8)).astype(np.float32)
        return [(row, row[:1]) for row in x]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])
"""
TEXTS = "".join(f"some words {i} and {i * 7 % 13} others,{'ab'[i % 2]}\n" for i in range(120))
COMMON = f"parallel: {{threads: 1, device: cpu, timeout_s: {TIMEOUT_S}, ranks: %d%s}}\n"
EVERY = "steps: 12, checkpoint_every: 3, evaluate_every: 4, log_every: 1"
RUNS = {
    "classifier": "model: {width: 32, heads: 4, layers: 1, ffn: 32}\n"
    f"data: {{source: csv, path: t.csv, vocab: 300, cache: cache}}\ntrain: {{{EVERY}, global_batch: 8}}\n"
    + COMMON
    % (1, ""),
    "lm": "workload: lm\nmodel: {preset: custom, width: 32, heads: 4, kv_heads: 2, layers: 2, ffn: 64}\n"
    "data: {source: text, path: t.txt, sequence: 16, vocab: 300, cache: cache}\n"
    f"train: {{{EVERY}, global_batch: 8}}\n" + COMMON % (2, ", strategy: fsdp"),
    "topics": "workload: topics\nmodel: {k: 3}\ndata: {path: x.npy}\ntrain: {steps: 12, checkpoint_every: 3}\n"
    + COMMON % (2, ""),
    "own": f"workload: own.py:Line\ndata: {{workers: 1}}\ntrain: {{{EVERY}, global_batch: 8}}\n" + COMMON % (2, ""),
}


def files(folder: Path) -> None:
    """What the runs are about."""
    import numpy as np

    (folder / "t.csv").write_text(f"text,label\n{TEXTS}")
    (folder / "t.txt").write_text(TEXTS * 8)
    (folder / "own.py").write_text(OWN)
    np.save(folder / "x.npy", np.random.default_rng(0).poisson(0.4, (200, 40)).astype(np.float64))
    for name, text in RUNS.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}")


@dataclass
class Attempt:
    """A command that runs, and all processes that it started."""

    process: subprocess.Popen[bytes]
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            found = [top, *top.children(recursive=True)]
            self.seen.update({one.pid: one for one in found})
            return found
        return []


def begin(words: list[str], folder: Path, log: Path, jumps: str = "") -> Attempt:
    path = [*([str(HERE / "jumping_clock")] if jumps else []), str(SOURCES)]
    environ = {**os.environ, "PYTHONPATH": ":".join(path), "CLOCK_JUMPS": jumps or "0 0"}
    with log.open("ab") as out:
        command = [sys.executable, "-m", "paceline", "train", *words, "--quiet"]
        return Attempt(subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environ))


def reached(phase: str, run: RunDir) -> bool:
    """Whether a run is where it is to be struck."""
    events = run.events_file(0)
    match phase:
        case "start":
            return True
        case "data":
            return run.path.is_dir()
        case "checkpoint":
            return any(run.checkpoints.glob(".step-*.writing")) or any(run.checkpoints.glob("step-*"))
    said = events.read_bytes() if events.is_file() else b""
    words = {"step": b'"kind":"step"', "evaluation": b'"step":4,', "end": b'"step":12,'}
    return words[phase] in said


PHASES = ("start", "data", "step", "evaluation", "checkpoint", "end")
Strike = Callable[[Attempt, RunDir, random.Random], Any]


def _signal(number: int, whom: str) -> Strike:
    def strike(attempt: Attempt, run: RunDir, dice: random.Random) -> None:
        tree = attempt.tree()
        others = tree[1:] or tree
        one = {"launcher": tree[:1], "any": tree, "other": others, "last": others[-1:]}[whom]
        if one:
            with suppress(psutil.Error):
                dice.choice(one).send_signal(number)

    return strike


def _fill(attempt: Attempt, run: RunDir, dice: random.Random) -> None:
    """The disk is full from now on."""
    with suppress(OSError), (run.path.parents[1] / "filler").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()


def _take_away(attempt: Attempt, run: RunDir, dice: random.Random) -> None:
    """The folder of checkpoints is not there for a while, as a file system that was unmounted."""
    with suppress(OSError):
        run.checkpoints.rename(run.path / "away")


def bring_back(run: RunDir) -> None:
    """The checkpoints that were away, beside those that the run wrote meanwhile."""
    away = run.path / "away"
    for path in away.glob("step-*"):
        if not (run.checkpoints / path.name).exists():
            run.checkpoints.mkdir(exist_ok=True)
            path.rename(run.checkpoints / path.name)
    shutil.rmtree(away, ignore_errors=True)


def _damage(attempt: Attempt, run: RunDir, dice: random.Random) -> None:
    """Stopped, then a byte of the newest checkpoint is another."""
    with suppress(ProcessLookupError):
        attempt.process.send_signal(signal.SIGTERM)
    attempt.process.wait(PATIENCE_S)
    for newest in sorted(run.checkpoints.glob("step-*"))[-1:]:
        victim = dice.choice(sorted(file for file in newest.iterdir() if file.stat().st_size))
        content = bytearray(victim.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        victim.write_bytes(content)


FAULTS: dict[str, Strike] = {
    "SIGTERM": _signal(signal.SIGTERM, "launcher"),
    "SIGINT": _signal(signal.SIGINT, "launcher"),
    "SIGKILL launcher": _signal(signal.SIGKILL, "launcher"),
    "SIGKILL any": _signal(signal.SIGKILL, "any"),
    "SIGKILL worker": _signal(signal.SIGKILL, "last"),
    "SIGTERM any": _signal(signal.SIGTERM, "other"),
    "frozen rank": _signal(signal.SIGSTOP, "other"),
    "disk full": _fill,
    "folder away": _take_away,
    "damaged file": _damage,
    "clock jumps": lambda attempt, run, dice: None,
}


def weights(run: RunDir) -> str:
    """A hash of all tensors of the last checkpoint."""
    from paceline.training.checkpoints.saved import newest, read_tensors

    found = newest(run.checkpoints, lambda line: None)
    assert found is not None
    digest = hashlib.sha256(str(found.step).encode())
    for name, tensor in read_tensors(found, "").items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders that nobody will look for."""
    odd = ("**/.*.tmp", "**/.step-*.writing", "**/.step-*.deleting", "**/.kept.*", "**/*.part-*")
    return [str(path.relative_to(folder)) for pattern in odd for path in folder.glob(pattern)]


def until_ended(attempt: Attempt, most_s: float) -> int | None:
    """The exit code; None where the command goes on for too long."""
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        attempt.tree()
        if (code := attempt.process.poll()) is not None:
            return code
        time.sleep(0.05)
    return None


def orphans(attempt: Attempt, most_s: float = 45) -> list[int]:
    """Processes that the command left behind; ranks whose launcher was killed take a moment to notice."""
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        alive = [pid for pid, one in attempt.seen.items() if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return []
        time.sleep(0.2)
    return alive
