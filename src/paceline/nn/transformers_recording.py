"""Patch the library transformers so that steps can be recorded: no mask is read back, no layer drop of 0 is drawn."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def patch_for_recording() -> Iterator[None]:
    """Make masks without reading what they hide, as under a recorder, and draw no number for a layer drop of 0.

    Where no mask is given none is made, unlike under a recorder. `torch.rand` is replaced until the block ends.
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
