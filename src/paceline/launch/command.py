"""The command `launch`: run a user's own program as several ranks of this machine.

    paceline launch --ranks 4 -- python train.py --lr 0.1

Each rank finds its place in the variables that torchrun sets, or in TF_CONFIG, and writes to our standard output and
error as it is; none reads from the terminal. Each rank is the head of its own process group, so that what it starts
ends with it.

    a rank fails          its peers get a few seconds to end by themselves, then they are killed; the first is named,
                          and its exit code is ours (128 + the signal, if one killed it)
    any signal to stop    passed on as it is, once of each kind; the exit code is then what the ranks make of it
    second Ctrl-C         the ranks are killed at once
    launcher killed       the ranks get SIGTERM and, half a minute later, SIGKILL (`orphans.py`)

Under torchrun, srun or mpirun this process is a rank already: it becomes the command, with the same variables set.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.errors import UserError
from paceline.io.files import print_json
from paceline.io.terminal import warn
from paceline.launch import root_cause
from paceline.launch.environment import LOCALHOST, RankInfo, detect_rank
from paceline.launch.local import POLL_S, build_rank_environment, reserve_port, supervise_ranks
from paceline.launch.signals import STOP_SIGNALS, StopRequest

PrintFn = Callable[[str], None]
LAUNCH_EXAMPLE = "paceline launch --ranks 2 -- python train.py"
MAX_LOCAL_RANKS = 1024  # on one machine; more is a slip of the hand


def launch_command(command: Sequence[str], ranks: int | None, restarts: int = 0, as_json: bool = False) -> int:
    """The verb: start the ranks, or become one where another launcher has started this process.

    `as_json` prints how it ended; what the ranks print then goes to standard error.
    """
    if not command:
        raise UserError(f"which command? write it after  --  as in  {LAUNCH_EXAMPLE}")
    if ranks is not None and not 1 <= ranks <= MAX_LOCAL_RANKS:
        raise UserError(f"--ranks: {ranks} is not a number of ranks of one machine; use 1 to {MAX_LOCAL_RANKS}")
    if restarts < 0:
        raise UserError(f"--restarts: {restarts} is not a number of restarts; use 0 or more")
    place = detect_rank(os.environ)
    if place is None and as_json:
        return _launch_as_json(command, ranks or 1, restarts)
    if place is None:
        return run_command_ranks(command, ranks or 1, restarts=restarts)
    if ranks not in (None, place.world):
        raise UserError(
            f"--ranks {ranks}: {place.launcher} has started this process as one of {place.world} already; "
            "leave --ranks out"
        )
    if as_json:
        raise UserError(f"--json: {place.launcher} started the ranks and alone knows how they end; leave it out")
    if restarts:
        raise UserError(f"--restarts {restarts}: {place.launcher} started the ranks and must start them again itself")
    replace_process(command, place)
    return 0


def _launch_as_json(command: Sequence[str], ranks: int, restarts: int) -> int:
    began, said = time.monotonic(), list[str]()
    code = run_command_ranks(command, ranks, restarts=restarts, say=said.append, output=sys.stderr)
    print_json({"exit_code": code, "ranks": ranks, "seconds": time.monotonic() - began, "said": said})
    return code


def run_command_ranks(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str] | None = None,
    restarts: int = 0,
    say: PrintFn = warn,
    output: IO[str] | None = None,
) -> int:
    """Run `command` in `ranks` processes; 0, or the exit code of the rank that failed first, which `say` names.

    After a failure all of them are started again, at most `restarts` times. `environ` is what they inherit (ours), and
    `output` where they print (as we do).
    """
    inherited = os.environ if environ is None else environ
    program = _find_program(command[0], inherited)
    with StopRequest() as stop:
        for tried in range(restarts + 1):
            with ExitStack() as held:
                ports = [held.enter_context(reserve_port()) for _ in range(1 + ranks)]
                all_ = held.enter_context(
                    _start_command_ranks(program, command, build_rank_environments(inherited, ports), output)
                )
                supervise_ranks(all_, stop)
                failures = all_.failures()
            if not failures:
                return 0
            first = root_cause.find_root_cause(failures)
            code = 128 + first.signal if first.signal else all_.ranks[first.rank].process.returncode
            if stop.insisted:
                say("paceline: killed by the second Ctrl-C")
                return code
            if stop.requested and first.signal in STOP_SIGNALS:
                say(f"paceline: stopped by {stop.signal_name}")
                return code
            again = not stop.requested and tried < restarts
            more = f"; all ranks start again, {tried + 1} of {restarts} times" if again else ""
            say(f"paceline: {first.message}{more}")
            if not again:
                return code
    raise AssertionError("the last try returns")


def build_rank_environments(inherited: Mapping[str, str], ports: Sequence[int]) -> list[dict[str, str]]:
    """The variables of each rank: torchrun's, which take one port, and TensorFlow's, which take one for each rank."""
    meeting, *own = ports
    shared = build_rank_environment(inherited, len(own), meeting)
    return [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), TF_CONFIG: config}
        for rank, config in enumerate(build_tf_configs(LOCALHOST, own))
    ]


def replace_process(command: Sequence[str], place: RankInfo) -> None:
    """Replace this process by the command, as the rank that its launcher made it. Never returns."""
    environ = os.environ | {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
    program = _find_program(command[0], environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, list(command), environ)
    except OSError as error:
        raise _start_error(program, error) from None


def _find_program(name: str, environ: Mapping[str, str]) -> str:
    found = shutil.which(name, path=environ.get("PATH"))
    if found is not None:
        return found
    if name.endswith(".py") and Path(name).is_file():
        raise UserError(f"{name} is not a program; type  {LAUNCH_EXAMPLE.replace('train.py', shlex.quote(name))}")
    if Path(name).is_file():
        raise UserError(f"{name} cannot be run; type  chmod +x {shlex.quote(name)}")
    words = f"; a command is given word by word, without quotes around it: {LAUNCH_EXAMPLE}" if " " in name else ""
    raise UserError(f"the command {name!r} is not found{words}")


def _start_error(program: str, error: OSError) -> UserError:
    return UserError(f"{program} cannot be started: {error.strerror}")


@dataclass
class _CommandRank:
    number: int
    process: subprocess.Popen[bytes]
    killed: bool = False  # by us
    failure: root_cause.RankFailure | None = None

    def look(self) -> None:
        if self.failure is None and self.process.poll():
            code = self.process.returncode
            self.failure = root_cause.describe_exit(self.number, code, time.time(), echo=self.killed, ours=False)


@dataclass
class _CommandRanks:
    ranks: list[_CommandRank]

    @property
    def over(self) -> bool:
        return all(rank.process.returncode is not None for rank in self.ranks)

    @property
    def leaving(self) -> bool:
        return False  # a command says nothing before it ends

    def failures(self) -> list[root_cause.RankFailure]:
        return [rank.failure for rank in self.ranks if rank.failure is not None]

    def listen(self) -> None:
        time.sleep(POLL_S)
        for rank in self.ranks:
            rank.look()

    def forward_signal(self, received: signal.Signals) -> None:
        self.signal(received)

    def signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.killed = rank.killed or number == signal.SIGKILL
                with suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, number)


@contextmanager
def _start_command_ranks(
    program: str, command: Sequence[str], environs: Sequence[dict[str, str]], output: IO[str] | None
) -> Iterator[_CommandRanks]:
    """The ranks, and a process that ends them if we are killed."""
    started = _CommandRanks([])
    script = Path(__file__).with_name("orphans.py")
    guard = subprocess.Popen([sys.executable, "-I", "-S", script], stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    try:
        for number, environ in enumerate(environs):
            process = _start_command_rank(program, command, environ, output)
            started.ranks.append(_CommandRank(number, process))
            guard.stdin.write(f"{process.pid}\n".encode())
            guard.stdin.flush()
        yield started
    finally:
        started.signal(signal.SIGKILL)
        for rank in started.ranks:
            rank.process.wait()
        guard.kill()
        guard.wait()
        guard.stdin.close()


def _start_command_rank(
    program: str, command: Sequence[str], environ: Mapping[str, str], output: IO[str] | None
) -> subprocess.Popen[bytes]:
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output}
    try:
        return subprocess.Popen(list(command), executable=program, env=environ, start_new_session=True, **streams)
    except OSError as error:
        raise _start_error(program, error) from None


TF_CONFIG = "TF_CONFIG"


def build_tf_configs(host: str, ports: Sequence[int]) -> list[str]:
    """The variable of each rank: all are workers, rank 0 is the chief, and rank n listens on the n-th port."""
    workers = [f"{host}:{port}" for port in ports]
    return [
        json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        for rank in range(len(workers))
    ]
