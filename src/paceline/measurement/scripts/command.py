"""Start a measured command on a number of ranks, without a shell, and leave no process of it behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.launch.environment import detect_rank
from paceline.launch.signals import StopRequest

REQUEST_VARIABLE = "PACELINE_OUTSIDE"
ON_PATH = Path(__file__).with_name("on_path")  # with sitecustomize.py


@dataclass(frozen=True)
class RecordRequest:
    folder: str
    steps: int
    ranks: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "RecordRequest | None":
        text = environ.get(REQUEST_VARIABLE)
        return cls(**json.loads(text)) if text else None

    def environ(self, given: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ON_PATH), given.get("PYTHONPATH"))))
        return {**given, "PYTHONPATH": path, REQUEST_VARIABLE: json.dumps(asdict(self))}


RANKS = "{ranks}"
EXAMPLE = "paceline measure --ranks 1,2 -- python train.py"
LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "--nproc-per-node"),
    **dict.fromkeys(("mpirun", "mpiexec", "srun"), "-n"),
    "accelerate": "--num_processes",
    "deepspeed": "--num_gpus",
    "fabric": "--devices",
    "horovodrun": "-np",
}  # the option with the number of ranks


@dataclass(frozen=True)
class MeasuredCommand:
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        script = next((word for word in self.words if word.endswith(".py")), self.words[0])
        return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).name.removesuffix(".py")) or "command"

    @property
    def starts_its_ranks(self) -> bool:
        return any(RANKS in word for word in self.words) or self.launcher is not None

    @property
    def launcher(self) -> str | None:
        first, *rest = self.words
        program = Path(first).name
        if program in LAUNCHERS:
            return program
        script = next((i for i, word in enumerate(rest) if word.endswith(".py")), len(rest))
        module = rest[rest.index("-m") + 1] if "-m" in rest[:-1] and rest.index("-m") < script else ""
        return module if module in LAUNCHERS else None

    def on(self, ranks: int) -> list[str]:
        words = [word.replace(RANKS, str(ranks)) for word in self.words]
        if self.starts_its_ranks:
            return words
        return [sys.executable, "-m", "paceline", "launch", "--ranks", str(ranks), "--", *words]


def check_command(
    words: Sequence[str], ranks: Sequence[int], environ: Mapping[str, str] = os.environ
) -> MeasuredCommand:
    if not words:
        raise UserError(f"no command is given; write it after  --  as in  {EXAMPLE}", code="missing-value")
    command = MeasuredCommand(tuple(words))
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        python = f"; use  python {words[0]}" if words[0].endswith(".py") else ""
        raise UserError(f"the command {words[0]!r} is not found, or not executable{python}", code="not-found")
    if len(ranks) > 1 and command.starts_its_ranks and not any(RANKS in word for word in words):
        typed = f"{LAUNCHERS[command.launcher or '']} {RANKS}"
        message = f"{command.launcher} starts the same number of processes each time; give it  {typed}"
        raise UserError(message, code="conflict", key="--ranks")
    if (rank := detect_rank(environ)) is not None:
        message = f"a command is measured with its own ranks; run  {EXAMPLE}  outside of {rank.launcher}"
        raise UserError(message, code="not-supported")
    return command


POLL_S = 0.05
GRACE_S = 10.0


def run_recorded(words: Sequence[str], request: RecordRequest, output: Path) -> int:
    """Run a command whose processes record their steps; return its exit code, negative if a signal ended it."""
    with open(output, "wb") as file, StopRequest() as stop:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=request.environ(os.environ),
            start_new_session=True,
        )
        try:
            while process.poll() is None and not stop.requested:
                time.sleep(POLL_S)
        finally:
            _terminate(process)
    if stop.requested:
        raise KeyboardInterrupt
    return process.returncode


def _terminate(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
