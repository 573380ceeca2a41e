"""The edge of the program: how a command ends, whatever happened. Nothing passes it but an exit code and one line.

0 done, 1 the run failed, 2 the request was wrong, 70 a bug of ours, whose traceback goes to a file.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from paceline import __version__, registry
from paceline.errors import Bug, PacelineError, RankSilent, RunFailed, UserError
from paceline.launch.environment import Place, detect
from paceline.launch.leaving import leave, leave_at_once
from paceline.signs import visible
from paceline.trusting import state_folder


@contextmanager
def exit_code_of_errors(leaving: Callable[[int], NoReturn] = sys.exit) -> Iterator[None]:
    """Ends the process as Paceline's own errors say, each in one line; others may be those of the user's program."""
    try:
        yield
    except PacelineError as error:
        say_why(error)
        if isinstance(error, Bug):
            _ask_for_report("", error.traceback)
        leaving(error.exit_code)


def _leave_failed(code: int) -> NoReturn:
    """A rank whose run failed leaves at once: torch's farewell would wait for connections that nobody answers."""
    place = _place()
    if code == RunFailed.exit_code and place is not None and place.world > 1:
        leave_at_once(code)
    sys.exit(code)


@contextmanager
def nothing_passes() -> Iterator[None]:
    """The same around a command of ours: what nobody foresaw is said in one line too, and which code is executed."""
    registry.announce = _say_code
    with exit_code_of_errors(_leave_failed):
        try:
            yield
        except (PacelineError, SystemExit, KeyboardInterrupt):
            raise
        except BrokenPipeError:  # who read our output has left
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except MemoryError as error:
            raise RunFailed("there is not enough memory for this") from error
        except OSError as error:  # a disk, a permission, a network
            raise RunFailed(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
        except BaseException as error:  # a panic of a library in Rust is no Exception
            _ask_for_report(f" ({registry.one_line(error)})", "".join(traceback.format_exception(error)))
            sys.exit(Bug.exit_code)


def end(code: int) -> NoReturn:
    """After a command that did its work: a rank of several leaves as such, whatever the command was."""
    place = _place()
    if place is not None and place.world > 1:
        leave(code)
    sys.exit(code)


def say_why(error: PacelineError) -> None:
    """The end of this process, in one line. What is wrong with a request is the same on every rank, and the main one
    says it; a run may fail on any."""
    place = _place()
    if place is None or place.world == 1 or isinstance(error, RankSilent):
        who = "paceline"
    elif isinstance(error, RunFailed):
        who = f"paceline: rank {place.rank}"
    elif place.rank == 0:
        who = "paceline"
    else:
        return
    _write(f"{who}: {error}")


def _ask_for_report(what: str, trace: str) -> None:
    file = _kept(f"paceline {__version__}, Python {platform.python_version()}, {platform.platform()}\n{trace}")
    where = f"with this file: {file}" if file else "with what was typed"
    _write(f"paceline: this is a bug of ours{what}; please report it {where}")


def _kept(text: str) -> Path | None:
    """The file that the text was written to, in the user's own folder or else in that for temporary files."""
    name = f"bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (state_folder() / "bugs", Path(tempfile.gettempdir())):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            return folder / name
    return None


def _say_code(file: Path) -> None:
    """Which file of the user's own is about to be executed."""
    if (place := _place()) is None or place.rank == 0:
        _write(f"executing {file}")


def _place() -> Place | None:
    try:
        return detect(os.environ)
    except UserError:
        return None


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(visible(text) + "\n")  # in one piece: the ranks share a terminal
