"""Loops compiled by numba, which may not be installed: import this only where it is."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import functools

from numba import njit


def compiled(function=None, *, fastmath=True):
    """Compiled when it is first called, and kept on disk where there is a place for it."""
    if function is None:
        return functools.partial(compiled, fastmath=fastmath)
    options = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
    try:
        return njit(**options, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache
        return njit(**options)(function)
