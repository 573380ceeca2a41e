"""Errors, each with an exit code, an error code and the key that it is about.

A message names what was given, what is allowed, and the line to type. A traceback reaches a user only for our own bugs.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

Code = Literal[
    # the request
    "unknown-key",  # no such key of a run file, cluster file or site file
    "unknown-name",  # no such workload, device, column, layout, class
    "invalid-value",  # a key or an option whose value is not allowed
    "missing-value",  # a key, an option or a file that is needed and not given
    "conflict",  # keys or options that exclude each other, or what an existing run was started with
    "not-supported",  # each part is valid, but this combination is not supported
    "not-found",  # no such file, folder or run
    "unreadable",  # exists, but cannot be opened, is no regular file, or is too large
    "invalid-format",  # not the YAML, JSON, CSV … that it should be
    "invalid-data",  # readable data with contents that cannot be used
    "not-writable",  # a file or folder cannot be written
    "not-installed",  # an optional dependency is missing
    "not-trusted",  # would execute code from elsewhere
    "unavailable",  # no such device, launcher, scheduler or network here
    "busy",  # in use by another process
    "does-not-fit",  # too little memory, time or money for what is asked
    "invalid-workload",  # a workload class does not keep its contract
    "invalid-request",  # anything else that the user can correct
    # the run
    "damaged",  # a file that Paceline wrote is not what was written
    "user-code-failed",  # the workload raised an exception
    "rank-failed",  # a rank died or was killed
    "rank-unresponsive",  # a rank does not answer
    "out-of-memory",
    "disk-full",
    "nonfinite",  # the loss or the gradient is not finite
    "replica-differs",  # ranks that must hold the same weights do not
    "run-failed",  # anything else that ended a run
    "internal-error",  # a bug of ours
]
"""What kind of error it is. Tests and programs look at this, never at the sentence."""


class PacelineError(Exception):
    """An expected error: its message is all that the user needs to read.

    `key` is the key of the run file (`train.lr`), the option (`--ranks`) or the file that it is about.
    """

    exit_code = 1
    code: Code = "run-failed"
    key: str = ""

    def __init__(self, *args: object, code: Code | None = None, key: str = "") -> None:
        super().__init__(*args)
        self.code, self.key = code or type(self).code, key


class UserError(PacelineError, ValueError):
    """The request was wrong: a value, a file, a folder. Nothing was started, nothing was written."""

    exit_code = 2
    code: Code = "invalid-request"


class InvalidValue(UserError):
    """A value of the argument or key `key` that cannot be used."""

    code: Code = "invalid-value"


class InvalidData(UserError):
    """Data that cannot be used."""

    code: Code = "invalid-data"


class RunFailed(PacelineError, RuntimeError):
    """The run started and could not continue: a rank died, the disk is full, the loss is not finite."""

    exit_code = 1


class InternalError(RunFailed):
    """A bug of ours. Its traceback goes to a file, or to whoever catches this in Python."""

    exit_code = 70
    code: Code = "internal-error"

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        self.add_note(traceback)


class OutOfMemory(RunFailed):
    """The run ran out of memory or, as far as one can tell, the system killed a rank because of it."""

    code: Code = "out-of-memory"
    certain = True  # false if a rank was killed and the cause is only likely


class RankUnresponsive(RunFailed):
    """A rank did not answer in time: `rank` is the silent one, not the one that noticed."""

    code: Code = "rank-unresponsive"

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> "tuple[type[RankUnresponsive], tuple[int, str]]":
        return type(self), (self.rank, str(self))


def reject_value(key: str, value: object, reason: str, code: Code = "not-supported") -> UserError:
    """Return the error for a value of the run file that cannot be used here."""
    return UserError(f"{key}={value}: {reason}", code=code, key=key)


def missing_value(key: str, hint: str) -> UserError:
    """Return the error for a key of the run file that is needed and not given."""
    return UserError(f"{key}: not given; {hint}", code="missing-value", key=key)


def not_installed(what: object, package: str, extra: str = "") -> UserError:
    """Return the error for a package that is needed for something."""
    message = f"{what} needs {package}, which is not installed; type  pip install '{extra or package}'"
    return UserError(message, code="not-installed", key=package)


def invalid_workload(method: str, reason: str) -> UserError:
    """Return the error for a method or an attribute of a workload that does not keep its contract."""
    return UserError(f"workload: {reason}", code="invalid-workload", key=method)


def join_names(names: Sequence[str], most: int = 4) -> str:
    """Join the first names on one line, and count the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(" ".join(name.split()) for name in names[:most]) + more


def suggest_path(path: Path) -> str:
    """Return the end of a message that suggests an existing file in place of a missing one; "" if none is near."""
    folder = next((one for one in path.parents if one.is_dir()), Path("/"))
    found = sorted(folder.glob("*" if folder == path.parent else "*/*"))
    shown = {str(one.relative_to(folder)): str(one) for one in found}
    return did_you_mean(path.relative_to(folder), shown, cutoff=0.7, shown=shown)


def did_you_mean(
    word: object, known: Iterable[str], *, cutoff: float = 0.5, shown: Mapping[str, str] | None = None
) -> str:
    """Return the end of a message that suggests the nearest known word, as it is `shown`; "" if none is near."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)
    return f", did you mean {(shown or {}).get(close[0], close[0])!r}?" if close else ""


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where that is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
