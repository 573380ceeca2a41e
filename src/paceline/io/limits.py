"""Limits of the shell (`ulimit`) under which torch cannot start: one line instead of pages of a library's frames."""

import resource

from paceline.errors import UserError

TORCH_KB = 2_000_000  # of addresses, which a process with torch takes
FILES, FILES_PER_RANK = 64, 16
UNLIMITED = resource.RLIM_INFINITY


def check_limits(ranks: int = 1) -> None:
    """Raise UserError for a limit that is too low to start ranks with torch; allow as many open files as needed."""
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    if memory != UNLIMITED and memory < TORCH_KB * 1024:
        raise _limit_error("-v", memory // 1024, f"kB of memory, and torch takes {TORCH_KB:,}", "unlimited")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_RANK * ranks
    if files != UNLIMITED and files < needed:
        if most != UNLIMITED and most < needed:
            raise _limit_error("-n", most, f"open files, and {needed} are needed for {ranks} rank(s)", "4096")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def _limit_error(option: str, value: int, problem: str, instead: str) -> UserError:
    message = f"ulimit {option} allows {value:,} {problem}; type  ulimit {option} {instead}"
    return UserError(message, code="unavailable", key=f"ulimit {option}")
