"""What may go wrong in a rank without being a mistake of ours, turned into failures of the run that say what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config import RunSpec
from paceline.config.registry import describe_error, format_user_trace, is_script
from paceline.errors import OutOfMemory, PacelineError, RunFailed
from paceline.launch.root_cause import is_secondary

TORCH_MESSAGES = {
    "'DistributedDataParallel' object has no attribute": (
        "workload: on several ranks the model that loss() gets can only be called; use nothing else of it there"
    ),
    **dict.fromkeys(
        ("got Double and Float", "Input type (double)"),
        "workload: the batch holds float64 and the model float32; make it float32 in data(), by x.astype('float32')",
    ),
}
"""Mistakes in a workload that torch reports in its own terms, and what they mean."""


@contextmanager
def translate_failures(spec: RunSpec) -> Iterator[None]:
    """Lost peers, memory that runs out and mistakes in the user's own code are failures of the run, said as such.

    Any other exception is a mistake of ours and stays what it is.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        if said := _explain_failure(error, spec):
            raise (OutOfMemory if is_out_of_memory(error) else RunFailed)(said) from error
        raise


def _explain_failure(error: Exception, spec: RunSpec) -> str:
    """What to tell the user; empty where nobody but us can do something about it."""
    if spec.parallel.ranks > 1 and is_secondary(error):
        return f"another rank failed or cannot be reached ({describe_error(error)})"
    if is_out_of_memory(error):
        wanted = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        for_what = f" for {wanted[1]} more" if wanted else ""
        return f"there is no memory{for_what}; use a smaller parallel.micro_batch, more ranks or a smaller model"
    for told, meant in TORCH_MESSAGES.items():
        if told in str(error):
            return f"{meant} ({describe_error(error)})"
    trace = format_user_trace(error, spec.workload)
    who = Path(spec.workload).name if is_script(spec.workload) else "the workload"
    return f"{who} failed: {describe_error(error)}\n\n{trace}" if trace else ""


def is_out_of_memory(error: Exception) -> bool:
    """On a device there is a type for it; torch's allocator for the CPU has nothing but words."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "you tried to allocate" in str(error)
