"""Turn what goes wrong in a rank into failures of the run; out of memory, halve the micro-batch."""

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.config import RunSpec
from paceline.config.registry import describe_error, find_entry, format_user_trace, is_script
from paceline.errors import Code, OutOfMemory, PacelineError, RunFailed, UserError
from paceline.launch.root_cause import is_secondary
from paceline.layout import Layout, layout_of
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn

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
RETRY_ORIGIN = "train.on_oom=retry"
SHRINK_ORIGIN = "parallel.least_ranks"


@contextmanager
def translate_failures(spec: RunSpec) -> Iterator[None]:
    """Raise RunFailed for lost peers, missing memory and mistakes of users; the rest are our bugs."""
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


def halve_micro_batch(spec: RunSpec, layout: Layout, error: OutOfMemory) -> RunSpec | None:
    """Return the spec to continue with after this error; None if the run ends with it."""
    retries = spec.train.on_oom == "retry" and find_entry(spec.workload).batched
    if not retries or not error.certain or layout.micro_batch == 1:
        return None
    return spec.replace({"parallel.micro_batch": layout.micro_batch // 2}, RETRY_ORIGIN)


def drop_lost_ranks(spec: RunSpec, error: RunFailed) -> RunSpec | None:
    """Return the spec to continue with on fewer ranks; None if the run ends with the error."""
    lost = not error.certain if isinstance(error, OutOfMemory) else error.code == "rank-failed"
    least = spec.parallel.least_ranks
    for ranks in range(spec.parallel.ranks - 1, least - 1, -1) if lost and least is not None else ():
        fewer = spec.replace({"parallel.ranks": ranks}, SHRINK_ORIGIN)
        with suppress(UserError):
            layout_of(fewer)
            return fewer
    return None


def record_retry(run: RunDir, spec: RunSpec, layout: Layout, error: OutOfMemory) -> None:
    """Write the smaller micro-batch to the run folder, and mention it in the error."""
    if (smaller := halve_micro_batch(spec, layout, error)) is not None and run.spec_file.is_file():
        run.rewrite(smaller)
        line = f"started again, it continues with parallel.micro_batch={smaller.parallel.micro_batch} ({RETRY_ORIGIN})"
        error.args = (f"{error}\n  {line}",)


def apply_recorded_retry(run: RunDir, spec: RunSpec, layout: Layout) -> RunSpec:
    """Return the spec with the smaller micro-batch that an earlier attempt has recorded."""
    before = run.recorded_spec()
    recorded = before.parallel.micro_batch
    if spec.train.on_oom != "retry" or before.origin("parallel.micro_batch") != RETRY_ORIGIN or recorded is None:
        return spec
    return spec.replace({"parallel.micro_batch": recorded}, RETRY_ORIGIN) if recorded < layout.micro_batch else spec


def prepare_retry(run: RunDir, spec: RunSpec, log: LogFn) -> None:
    """Free the memory of the failed attempt in this process, and record how the run continues."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    run.rewrite(spec)
    run.remove_heartbeats()
    if spec.origin("parallel.ranks") == SHRINK_ORIGIN:
        log(f"a rank was lost: continuing with parallel.ranks={spec.parallel.ranks} ({SHRINK_ORIGIN})")
    else:
        log(f"out of memory: continuing with parallel.micro_batch={spec.parallel.micro_batch} ({RETRY_ORIGIN})")
