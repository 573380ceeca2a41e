"""The command `launch`: run a user's own program as several ranks of this machine.

    paceline launch --ranks 4 -- python train.py --lr 0.1

Each rank gets the variables that torchrun sets, and TF_CONFIG, and leads its own process group, so that its child
processes end with it. Failures and signals are handled as by `local.py`, but signals reach the ranks unchanged, and
the ranks of a killed launcher are ended by a shell that outlives it.

Under torchrun, srun or mpirun this process is a rank already: the command replaces it, with the same variables set.
"""

import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import UserError
from paceline.io.arguments import option_error
from paceline.io.files import print_json
from paceline.io.terminal import warn
from paceline.launch.environment import LOCALHOST, RANK_VARIABLES, RankInfo, detect_rank
from paceline.launch.local import POLL_S, build_rank_environment, reserve_port, supervise_ranks
from paceline.launch.root_cause import RankFailure, describe_exit, find_root_cause
from paceline.launch.signals import STOP_SIGNALS, StopRequest

LAUNCH_EXAMPLE = "paceline launch --ranks 2 -- python train.py"
MAX_LOCAL_RANKS = 1024
GUARD = """
while read -r rank; do groups="$groups -$rank"; done
kill -s TERM -- $groups
sleep 30
kill -s KILL -- $groups
"""
"""Ends the process groups whose ids it reads, once the pipe closes: the launcher kills this shell before it ends."""


def launch_command(command: Sequence[str], ranks: int | None, restarts: int = 0, as_json: bool = False) -> int:
    """Start the ranks, or become one if another launcher has started this process; return the exit code.

    `as_json` prints how it ended; the ranks then print to standard error.
    """
    if not command:
        raise UserError(f"which command? write it after  --  as in  {LAUNCH_EXAMPLE}", code="missing-value")
    if ranks is not None and not 1 <= ranks <= MAX_LOCAL_RANKS:
        raise option_error("--ranks", f"{ranks} is not a number of ranks of one machine; use 1 to {MAX_LOCAL_RANKS}")
    if restarts < 0:
        raise option_error("--restarts", f"{restarts} is not a number of restarts; use 0 or more")
    rank_info = detect_rank(os.environ)
    if rank_info is None:
        start_s, messages, ranks = time.monotonic(), list[str](), ranks or 1
        log, output = (messages.append, sys.stderr) if as_json else (warn, None)
        code = run_command_ranks(command, ranks, restarts=restarts, log=log, output=output)
        if as_json:
            seconds = time.monotonic() - start_s
            print_json({"exit_code": code, "ranks": ranks, "seconds": seconds, "said": messages})
        return code
    launcher = rank_info.launcher
    given = {"--ranks": ranks not in (None, rank_info.world), "--json": as_json, "--restarts": restarts}
    if wrong := next((option for option, is_wrong in given.items() if is_wrong), ""):
        raise option_error(wrong, f"{launcher} has started {rank_info.world} ranks already; leave it out")
    replace_process(command, rank_info)
    return 0


def run_command_ranks(
    command: Sequence[str],
    ranks: int,
    environ: Mapping[str, str] | None = None,
    restarts: int = 0,
    log: Callable[[str], None] = warn,
    output: IO[str] | None = None,
) -> int:
    """Run `command` in `ranks` processes and return 0, or the exit code of the rank that failed first.

    After a failure all ranks are restarted, at most `restarts` times. `log` receives what failed; the ranks inherit
    `environ` (default: ours) and the standard output `output`.
    """
    inherited = os.environ if environ is None else environ
    program = _find_program(command[0], inherited)
    with StopRequest() as stop:
        for attempt in range(1, restarts + 2):
            with ExitStack() as stack:
                ports = [stack.enter_context(reserve_port()) for _ in range(1 + ranks)]
                environs = build_rank_environments(inherited, ports)
                started = stack.enter_context(_start_command_ranks(program, command, environs, output))
                supervise_ranks(started, stop)
                failures = started.failures()
            if not failures:
                return 0
            first = find_root_cause(failures)
            code = 128 + first.signal if first.signal else started.processes[first.rank].returncode
            if stop.interrupted_twice:
                log("paceline: killed by the second Ctrl-C")
                return code
            if stop.requested and first.signal in STOP_SIGNALS:
                log(f"paceline: stopped by {stop.signal_name}")
                return code
            restart = not stop.requested and attempt <= restarts
            log(f"paceline: {first.error}{f'; restart {attempt} of {restarts}' if restart else ''}")
            if not restart:
                return code
    raise AssertionError("the last attempt returns")


def build_rank_environments(inherited: Mapping[str, str], ports: Sequence[int]) -> list[dict[str, str]]:
    """Return the variables of each rank: torchrun's, with the first port, and TensorFlow's, with one port per rank."""
    main_port, *own = ports
    shared = build_rank_environment(inherited, len(own), main_port)
    cluster = {"worker": [f"{LOCALHOST}:{port}" for port in own]}
    tasks = ({"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(len(own)))
    return [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "TF_CONFIG": json.dumps(task)}
        for rank, task in enumerate(tasks)
    ]


def replace_process(command: Sequence[str], rank_info: RankInfo) -> None:
    """Replace this process by the command, with torchrun's variables for its rank. Never returns."""
    numbers = (rank_info.rank, rank_info.world, rank_info.local_rank, rank_info.local_world)
    environ = os.environ | {name: str(number) for name, number in zip(RANK_VARIABLES, numbers, strict=True)}
    environ |= {"MASTER_ADDR": rank_info.address, "MASTER_PORT": str(rank_info.port)}
    program = _find_program(command[0], environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, list(command), environ)
    except OSError as error:
        raise _start_error(program, error) from None


def _find_program(name: str, environ: Mapping[str, str]) -> str:
    if (program := shutil.which(name, path=environ.get("PATH"))) is not None:
        return program
    if Path(name).is_file():
        hint = f"is not a program; type  chmod +x {shlex.quote(name)},  or begin with  python {shlex.quote(name)}"
        raise UserError(f"{name} {hint}", code="not-found", key=name)
    raise UserError(f"the command {name!r} is not found; write it as  {LAUNCH_EXAMPLE}", code="not-found", key=name)


def _start_error(program: str, error: OSError) -> UserError:
    return UserError(f"{program} cannot be started: {error.strerror}", code="unavailable", key=program)


class _CommandRanks:
    leaving = False  # a command sends no result before it ends

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._killed: set[int] = set()
        self._failures: dict[int, RankFailure] = {}

    @property
    def over(self) -> bool:
        return all(process.returncode is not None for process in self.processes)

    def failures(self) -> list[RankFailure]:
        return list(self._failures.values())

    def listen(self) -> None:
        time.sleep(POLL_S)
        for rank, process in enumerate(self.processes):
            if rank not in self._failures and (code := process.poll()):
                secondary = rank in self._killed
                self._failures[rank] = describe_exit(rank, code, time.time(), secondary, ours=False)

    def signal(self, number: signal.Signals) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                if number == signal.SIGKILL:
                    self._killed.add(rank)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    forward_signal = signal


@contextmanager
def _start_command_ranks(
    program: str, command: Sequence[str], environs: Sequence[dict[str, str]], output: IO[str] | None
) -> Iterator[_CommandRanks]:
    started = _CommandRanks()
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    guard = subprocess.Popen(["sh", "-c", GUARD], **streams, start_new_session=True)
    assert guard.stdin is not None
    try:
        for environ in environs:
            options: Any = {"env": environ, "stdin": subprocess.DEVNULL, "stdout": output, "start_new_session": True}
            try:
                process = subprocess.Popen(list(command), executable=program, **options)
            except OSError as error:
                raise _start_error(program, error) from None
            started.processes.append(process)
            guard.stdin.write(f"{process.pid}\n".encode())
            guard.stdin.flush()
        yield started
    finally:
        started.signal(signal.SIGKILL)
        for process in started.processes:
            process.wait()
        guard.kill()
        guard.wait()
        guard.stdin.close()


def run_with_stand_in(words: Sequence[str], stand_in: Path, usage: str) -> None:
    """Run SCRIPT.py or `-m MODULE` with its arguments; packages in the folder `stand_in` are found before others.

    The processes that the program starts find them too: by `sys.path`, which multiprocessing hands on, or PYTHONPATH.
    """
    as_module = list(words[:1]) == ["-m"]
    words = list(words[1:] if as_module else words)
    if not words or (words[0].startswith("-") and not as_module):
        raise UserError(f"which program? write it as  {usage}", code="not-found")
    if not as_module and not Path(words[0]).is_file():
        raise UserError(f"{words[0]} is not a file; write it as  {usage}", code="not-found")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stand_in), os.environ.get("PYTHONPATH")]))
    sys.path[0] = str(Path.cwd() if as_module else Path(words[0]).resolve().parent)
    sys.path.insert(1, str(stand_in))
    sys.argv = words
    if as_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
