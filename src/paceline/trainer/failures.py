"""Turn what may go wrong in a rank without being a bug of ours into failures of the run."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config import RunSpec
from paceline.config.registry import describe_error, format_user_trace, is_script
from paceline.errors import Code, OutOfMemory, PacelineError, RunFailed
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
    """Raise RunFailed for lost peers, missing memory and mistakes in the user's code; other exceptions are our bugs."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        code: Code = "user-code-failed"
        kind = RunFailed
        trace = format_user_trace(error, spec.workload)
        meaning = next((meaning for text, meaning in TORCH_MESSAGES.items() if text in str(error)), "")
        if spec.parallel.ranks > 1 and is_secondary(error):
            code, message = "rank-failed", f"another rank failed or cannot be reached ({describe_error(error)})"
        elif is_out_of_memory(error):
            wanted = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
            size = f" for {wanted[1]} more" if wanted else ""
            code, kind = "out-of-memory", OutOfMemory
            message = f"there is no memory{size}; use a smaller parallel.micro_batch, more ranks or a smaller model"
        elif meaning:
            message = f"{meaning} ({describe_error(error)})"
        elif trace:
            who = Path(spec.workload).name if is_script(spec.workload) else "the workload"
            message = f"{who} failed: {describe_error(error)}\n\n{trace}"
        else:
            raise
        raise kind(message, code=code) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out; torch's allocator for the CPU has no type for it."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "you tried to allocate" in str(error)
