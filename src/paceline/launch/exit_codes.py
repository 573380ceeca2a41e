"""The edge of the program: how a command ends, whatever happened. Nothing passes it but an exit code and one line.

0 done, 1 the run failed, 2 the request was wrong, 70 a bug of ours, whose traceback goes to a file.
"""

from __future__ import annotations

import logging
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

from paceline import __version__
from paceline.config import registry
from paceline.config.trust import get_state_folder
from paceline.errors import InternalError, PacelineError, RankUnresponsive, RunFailed, UserError
from paceline.io.escape import escape_hidden
from paceline.launch.environment import RankInfo, detect_rank
from paceline.launch.signals import exit_immediately, exit_rank


@contextmanager
def exit_on_known_error(leaving: Callable[[int], NoReturn] = sys.exit) -> Iterator[None]:
    """Ends the process as Paceline's own errors say, each in one line; others may be those of the user's program."""
    try:
        yield
    except PacelineError as error:
        print_error(error)
        if isinstance(error, InternalError):
            _print_bug_report("", error.traceback)
        leaving(error.exit_code)


def _exit_failed_rank(code: int) -> NoReturn:
    """A rank whose run failed leaves at once: torch's farewell would wait for connections that nobody answers."""
    place = _rank_info()
    if code == RunFailed.exit_code and place is not None and place.world > 1:
        exit_immediately(code)
    sys.exit(code)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """The same around a command of ours: what nobody foresaw is said in one line too, and which code is executed."""
    with exit_on_known_error(_exit_failed_rank), _print_user_code():
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
            _print_bug_report(f" ({registry.describe_error(error)})", "".join(traceback.format_exception(error)))
            sys.exit(InternalError.exit_code)


def exit_command(code: int) -> NoReturn:
    """After a command that did its work: a rank of several leaves as such, whatever the command was."""
    place = _rank_info()
    if place is not None and place.world > 1:
        exit_rank(code)
    sys.exit(code)


def print_error(error: PacelineError) -> None:
    """The end of this process, in one line. What is wrong with a request is the same on every rank, and the main one
    says it; a run may fail on any."""
    place = _rank_info()
    if place is None or place.world == 1 or isinstance(error, RankUnresponsive):
        who = "paceline"
    elif isinstance(error, RunFailed):
        who = f"paceline: rank {place.rank}"
    elif place.rank == 0:
        who = "paceline"
    else:
        return
    _write_line(f"{who}: {error}")


def _print_bug_report(what: str, trace: str) -> None:
    file = _write_bug_file(
        f"paceline {__version__}, Python {platform.python_version()}, {platform.platform()}\n{trace}"
    )
    where = f"with this file: {file}" if file else "with what was typed"
    _write_line(f"paceline: this is a bug of ours{what}; please report it {where}")


def _write_bug_file(text: str) -> Path | None:
    """The file that the text was written to, in the user's own folder or else in that for temporary files."""
    name = f"bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (get_state_folder() / "bugs", Path(tempfile.gettempdir())):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            return folder / name
    return None


@contextmanager
def _print_user_code() -> Iterator[None]:
    """Print which file of the user's is about to be executed, on the main rank."""
    logger, handler = logging.getLogger(registry.USER_CODE_LOGGER), logging.Handler()
    handler.emit = lambda record: _write_line(record.getMessage())  # type: ignore[method-assign]
    place = _rank_info()
    logger.setLevel(logging.INFO if place is None or place.rank == 0 else logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _rank_info() -> RankInfo | None:
    try:
        return detect_rank(os.environ)
    except UserError:
        return None


def _write_line(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(escape_hidden(text) + "\n")  # in one piece: the ranks share a terminal
