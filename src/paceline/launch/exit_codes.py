"""Map exceptions to exit codes and one-line messages.

0 done, 1 the run failed, 2 the request was wrong, 70 a bug of ours, whose traceback goes to a file.
"""

import logging
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from paceline import __version__
from paceline.config import registry
from paceline.errors import InternalError, PacelineError, RankUnresponsive, RunFailed, UserError
from paceline.io.escape import escape_hidden
from paceline.launch.environment import SINGLE_RANK, RankInfo, detect_rank
from paceline.launch.signals import exit_immediately, exit_rank


@contextmanager
def exit_on_known_error(exit_with: Callable[[int], NoReturn] = sys.exit) -> Iterator[None]:
    """Print Paceline's own errors in one line and exit with their code; others, perhaps of user code, pass."""
    try:
        yield
    except PacelineError as error:
        print_error(error, _find_rank_info())
        if isinstance(error, InternalError):
            _print_bug_report("", error.traceback)
        exit_with(error.exit_code)


def _exit_failed_rank(code: int) -> NoReturn:
    """Exit at once from a rank of several whose run failed: torch would wait for connections that nobody answers."""
    if code == RunFailed.exit_code and _find_rank_info().world > 1:
        exit_immediately(code)
    sys.exit(code)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit with a code and one line whatever a command raises, and print which files of the user are executed."""
    with exit_on_known_error(_exit_failed_rank), _print_user_code():
        try:
            yield
        except (PacelineError, SystemExit, KeyboardInterrupt):
            raise
        except BrokenPipeError:  # the reader of our output has closed it
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except MemoryError as error:
            raise RunFailed("there is not enough memory for this", code="out-of-memory") from error
        except OSError as error:  # a disk, a permission, a network
            raise RunFailed(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
        except BaseException as error:  # a panic of a Rust library is not an Exception
            _print_bug_report(f" ({registry.describe_error(error)})", "".join(traceback.format_exception(error)))
            sys.exit(InternalError.exit_code)


def exit_command(code: int) -> NoReturn:
    """Exit after a command that did its work, without finalising the interpreter in a rank of several."""
    if _find_rank_info().world > 1:
        exit_rank(code)
    sys.exit(code)


def print_error(error: PacelineError, rank_info: RankInfo) -> None:
    """Print an error in one line: a wrong request, which is the same on every rank, on the main rank only."""
    if rank_info.world > 1 and isinstance(error, RunFailed) and not isinstance(error, RankUnresponsive):
        _write_line(f"paceline: rank {rank_info.rank}: {error}")
    elif rank_info.rank == 0 or isinstance(error, RankUnresponsive):
        _write_line(f"paceline: {error}")


def _print_bug_report(what: str, trace: str) -> None:
    version = f"paceline {__version__}, Python {platform.python_version()}, {platform.platform()}"
    attachment = "what was typed"
    with suppress(OSError):
        handle, name = tempfile.mkstemp(".txt", "paceline-bug-")
        with open(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(f"{version}\n{trace}")
        attachment = f"this file: {name}"
    _write_line(f"paceline: this is a bug of ours{what}; please report it with {attachment}")


@contextmanager
def _print_user_code() -> Iterator[None]:
    logger, handler = logging.getLogger(registry.USER_CODE_LOGGER), logging.Handler()
    printed: set[str] = set()

    def print_once(record: logging.LogRecord) -> None:
        if (text := record.getMessage()) not in printed:
            printed.add(text)
            _write_line(text)

    handler.emit = print_once  # type: ignore[method-assign]
    logger.setLevel(logging.INFO if _find_rank_info().rank == 0 else logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _find_rank_info() -> RankInfo:
    try:
        return detect_rank(os.environ) or SINGLE_RANK
    except UserError:
        return SINGLE_RANK


def _write_line(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(escape_hidden(text) + "\n")  # in one write: the ranks share a terminal
