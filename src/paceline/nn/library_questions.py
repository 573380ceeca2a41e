"""Spare a step what the library transformers asks or draws on the host without need, so that it can be recorded."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def spare_questions() -> Iterator[None]:
    """Let it make masks as under a recorder, where it does not ask what they hide, and drop no layer by chance of 0.

    Without a mask it makes none, which it would under a recorder.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    before, draw = masks.is_tracing, torch.rand

    def rand(*sides: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_locals.get("self")
        if sides == ([],) and not options and getattr(caller, "layerdrop", None) == 0:
            return 1.0
        return draw(*sides, **options)

    masks.is_tracing, torch.rand = lambda tensor=None: tensor is not None, rand
    try:
        yield
    finally:
        masks.is_tracing, torch.rand = before, draw
