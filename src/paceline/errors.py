"""The two ways a request ends badly, each with its exit code.

A message says what was given, what is allowed, and the line to type. A traceback reaches a user only for
our own bugs.
"""


class PacelineError(Exception):
    """An end that was foreseen: its message is all the user needs to read."""

    exit_code = 1


class UserError(PacelineError, ValueError):
    """The request was wrong: a value, a file, a folder. Nothing was started, nothing was written."""

    exit_code = 2


class RunFailed(PacelineError, RuntimeError):
    """The run began and could not go on: a rank died, the disk is full, the loss is not finite."""

    exit_code = 1
