"""Faults in running trainings: which there are, when they strike, and what must hold afterwards."""

import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from commands import Command

from paceline.launch.heartbeat import read_beats
from paceline.runlog.run_dir import RunDir

SLOW = float(os.environ.get("SLOW", "1"))
"""How much more time everything has on a machine with other work."""
TIMEOUT_S = 4 * SLOW
"""parallel.timeout_s of a run that is about to be frozen; others have time for a busy machine."""
GRACE_S = 10 * SLOW
"""After a rank was frozen, a run ends within so much more."""
PATIENCE_S = 120 * SLOW
"""For what takes no time on a machine that is idle."""
ORPHANS_S = 45 * SLOW
"""Ranks whose launcher was killed take a moment to notice, and may save before they leave."""

OWN = """
import numpy as np, torch
from paceline import Workload

X = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)

class Line(Workload):
    def model(self): return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    def data(self, split): return [(row, row[:1]) for row in X]
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])
"""
STEPS = 30
WORDS = ("apple", "pear", "plum", "fig", "grape", "melon", "lemon", "lime", "peach", "cherry", "mango", "olive", "nut")
TEXTS = "".join(f"{WORDS[i % 13]} {WORDS[i * 7 % 11]} and {WORDS[i * i % 13]} {i},{'ab'[i % 2]}\n" for i in range(120))
EVERY = f"steps: {STEPS}, checkpoint_every: 4, evaluate_every: 5, log_every: 1, global_batch: 8"
RUNS = {
    "classifier": "model: {width: 32, heads: 4, layers: 1, ffn: 32}\n"
    f"data: {{source: csv, path: t.csv, vocab: 300, cache: cache}}\ntrain: {{{EVERY}}}\n"
    "parallel: {threads: 1, device: cpu}\n",
    "lm": "workload: lm\nmodel: {preset: custom, width: 32, heads: 4, kv_heads: 2, layers: 2, ffn: 64}\n"
    f"data: {{source: text, path: t.txt, sequence: 16, vocab: 300, cache: cache}}\ntrain: {{{EVERY}}}\n"
    "parallel: {threads: 1, device: cpu, ranks: 2, strategy: fsdp}\n",
    "topics": "workload: topics\nmodel: {k: 3}\ndata: {path: t.csv, cache: cache}\n"
    f"train: {{steps: {STEPS}, checkpoint_every: 4}}\nparallel: {{threads: 1, device: cpu, ranks: 2}}\n",
    "own": f"workload: own.py:Line\ndata: {{workers: 1}}\ntrain: {{{EVERY}}}\n"
    "parallel: {threads: 1, device: cpu, ranks: 2}\n",
}


def files(folder: Path) -> None:
    (folder / "t.csv").write_text(f"text,label\n{TEXTS}")
    (folder / "t.txt").write_text(TEXTS * 8)
    (folder / "own.py").write_text(OWN)
    for name, text in RUNS.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}")


PHASES = ("start", "data", "step", "evaluation", "checkpoint", "end")
SAVED = 4  # steps before the first checkpoint
LATE = ("step", "evaluation", "checkpoint", "end")  # in which a run is struck first: there is something to lose
NEVER = {("topics", "evaluation")}
"""Phases that a run does not have."""
SPAN_S = {"start": 0.4, "data": 0.3, "end": 0.05}
"""A strike comes at a random moment of so long after a phase was seen to begin."""


@dataclass
class Struck:
    """A run at the moment of a fault."""

    command: Command
    run: RunDir
    disk: Path
    dice: random.Random

    def reached(self, phase: str, before: set[int]) -> bool:
        """Whether it is where it is to be struck. `before` are processes of earlier attempts."""
        if phase == "start":
            return True
        beats = [beat for beat in read_beats(self.run.heartbeats) if beat.pid not in before]
        if phase == "data":  # a corpus is prepared under a lock; without one, samples are made when ranks begin
            return bool(beats) or any((self.disk / "cache").rglob("*.lock"))
        if phase == "step":
            return any(beat.phase in ("step", "data") and beat.step > SAVED for beat in beats)
        if phase == "end":
            return any(beat.phase == "end" or beat.step >= STEPS for beat in beats)
        return any(beat.phase == phase and beat.step >= SAVED for beat in beats)


Strike = Callable[[Struck], int | None]
"""Strikes, and says which process was frozen, if one was."""


def _signal(number: int, whom: Callable[[list[psutil.Process]], list[psutil.Process]]) -> Strike:
    def strike(at: Struck) -> None:
        if found := whom(at.command.tree()):
            with suppress(psutil.Error):
                at.dice.choice(found).send_signal(number)

    return strike


def _freeze(at: Struck) -> int | None:
    """One of several processes stays stopped; the only one of a run goes on after a while."""
    first, *others = at.command.tree() or [None]
    if first is None:
        return None
    victim = at.dice.choice(others or [first])
    with suppress(psutil.Error):
        victim.suspend()
        if others:
            return victim.pid
        time.sleep(0.5)
        victim.resume()
    return None


def _workers(tree: list[psutil.Process]) -> list[psutil.Process]:
    """The last of its line: a data worker where there is one, else a rank."""
    parents = set()
    for one in tree:
        with suppress(psutil.Error):
            parents.add(one.ppid())
    return [one for one in tree if one.pid not in parents]


def _fill(at: Struck) -> None:
    with suppress(OSError), (at.disk / "filler").open("wb") as file:
        while True:
            file.write(bytes(1 << 18))
            file.flush()


def _write_protect(at: Struck) -> None:
    """The folder of runs is read-only from now on, as a file system after an error of its disk."""
    runs, readonly = at.run.path.parent, at.disk / "readonly"
    readonly.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", runs, readonly], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", readonly], check=True)  # nobody can be writing there
    subprocess.run(["mount", "--bind", readonly, runs], check=True)
    subprocess.run(["umount", "-l", readonly], check=True)


def _take_away(at: Struck) -> None:
    """The folder of checkpoints is not there for a while, as a file system that was unmounted."""
    with suppress(OSError):
        at.run.checkpoints.rename(at.run.path / "away")


def _damage(at: Struck) -> None:
    """Stopped; then a bit of the newest checkpoint, of the prepared data or of the events is another."""
    with suppress(psutil.Error):
        psutil.Process(at.command.process.pid).terminate()
    until_ended(at.command, PATIENCE_S)
    newest = sorted(at.run.checkpoints.glob("step-*"))[-1:]
    kinds = [at.dice.choice([*newest, at.disk / "cache", at.run.events]), *newest]
    for folder in kinds:
        if victims := sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size):
            victim = at.dice.choice(victims)
            content = bytearray(victim.read_bytes())
            content[at.dice.randrange(len(content))] ^= 1 << at.dice.randrange(8)
            victim.write_bytes(content)
            return


FAULTS: dict[str, Strike] = {
    "SIGTERM": _signal(signal.SIGTERM, lambda tree: tree[:1]),
    "SIGINT": _signal(signal.SIGINT, lambda tree: tree[:1]),
    "SIGKILL launcher": _signal(signal.SIGKILL, lambda tree: tree[:1]),
    "SIGKILL any": _signal(signal.SIGKILL, lambda tree: tree),
    "SIGKILL worker": _signal(signal.SIGKILL, _workers),
    "SIGTERM any": _signal(signal.SIGTERM, lambda tree: tree[1:] or tree),
    "frozen": _freeze,
    "disk full": _fill,
    "read-only": _write_protect,
    "folder away": _take_away,
    "damaged file": _damage,
    "clock jumps": lambda at: None,
}
MOUNTING = ("disk full", "read-only")
"""Faults for whoever may mount; a command may say that it cannot write where it is told to."""


def mend(run: RunDir, disk: Path) -> None:
    """What an administrator does after a fault: room, a disk that can be written to, checkpoints that are back."""
    (disk / "filler").unlink(missing_ok=True)
    while str(run.path.parent) in _mounts():
        subprocess.run(["umount", "-l", run.path.parent], check=True)
    away = run.path / "away"
    for path in away.glob("step-*"):
        if not (run.checkpoints / path.name).exists():
            run.checkpoints.mkdir(exist_ok=True)
            path.rename(run.checkpoints / path.name)
    shutil.rmtree(away, ignore_errors=True)


def _mounts() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def weights(run: RunDir) -> str:
    """A hash of all tensors of the last checkpoint."""
    from paceline.trainer.checkpoint.reader import find_newest, read_tensors

    found = find_newest(run.checkpoints, lambda line: None)
    assert found is not None
    digest = hashlib.sha256(str(found.step).encode())
    for name, tensor in read_tensors(found, "").items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def leftovers(folder: Path) -> list[str]:
    odd = ("**/.*.tmp", "**/.step-*.writing", "**/.step-*.deleting", "**/.kept.*", "**/*.part-*")
    return [str(path.relative_to(folder)) for pattern in odd for path in folder.glob(pattern)]


def until_ended(command: Command, most_s: float) -> int | None:
    """The exit code; None where the command goes on for too long."""
    end, looks = time.monotonic() + most_s, itertools.count()
    while time.monotonic() < end:
        if (code := command.code) is not None:
            return code
        if next(looks) % 10 == 0:
            command.tree()
        time.sleep(0.02)
    return command.code


def orphans(command: Command) -> list[int]:
    end = time.monotonic() + ORPHANS_S
    while (alive := command.alive()) and time.monotonic() < end:
        time.sleep(0.02)
    return alive


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A disk of its own, which can be filled; a plain folder, and False, where nobody may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    mounted = subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=False)
