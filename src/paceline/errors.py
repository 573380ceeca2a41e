"""The ways a request ends badly, each with its exit code.

A message says what was given, what is allowed, and the line to type. A traceback reaches a user only for
our own bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


class PacelineError(Exception):
    """An error that was foreseen: its message is all the user needs to read.

    `code` says what kind of error it is, and `key` which value it is about: tests and programs look at these, never at
    the sentence.
    """

    exit_code = 1

    def __init__(self, *args: object, code: str = "", key: str = "") -> None:
        super().__init__(*args)
        self.code, self.key = code, key


class UserError(PacelineError, ValueError):
    """The request was wrong: a value, a file, a folder. Nothing was started, nothing was written."""

    exit_code = 2


class RunFailed(PacelineError, RuntimeError):
    """The run began and could not go on: a rank died, the disk is full, the loss is not finite."""

    exit_code = 1


class InternalError(RunFailed):
    """A mistake of ours. The traceback is for us: it goes to a file, or to who catches this in Python."""

    exit_code = 70

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        self.add_note(traceback)


class OutOfMemory(RunFailed):
    """There was no memory left for the run or, as far as one can tell, the system killed a rank for want of it."""

    certain = True
    """False where a rank was killed and nobody said why."""


class RankUnresponsive(RunFailed):
    """A rank did not answer in time: `rank` is that one, whoever noticed."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankUnresponsive], tuple[int, str]]:
        return type(self), (self.rank, str(self))


def join_names(names: Sequence[str], most: int = 4) -> str:
    """The first of them on one line, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(" ".join(name.split()) for name in names[:most]) + more


def did_you_mean(
    word: object, known: Iterable[str], *, cutoff: float = 0.5, shown: Mapping[str, str] | None = None
) -> str:
    """The end of a message: the known word nearest to a wrong one, as it is `shown`; empty where none is near."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f", did you mean {(shown or {}).get(close[0], close[0])!r}?" if close else ""
