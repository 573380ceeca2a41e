"""`train.on_oom: retry`: continue a run that ran out of memory with half the micro-batch, and the same answer."""

import gc
import sys

from paceline.config import RunSpec
from paceline.config.registry import find_entry
from paceline.errors import OutOfMemory
from paceline.layout import Layout
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn

RETRY_ORIGIN = "train.on_oom=retry"


def halve_micro_batch(spec: RunSpec, layout: Layout, error: OutOfMemory) -> RunSpec | None:
    """Return the spec to continue with after this error; None if the run ends with it."""
    retries = spec.train.on_oom == "retry" and find_entry(spec.workload).batched
    if not retries or not error.certain or layout.micro_batch == 1:
        return None
    return spec.replace({"parallel.micro_batch": layout.micro_batch // 2}, RETRY_ORIGIN)


def record_retry(run: RunDir, spec: RunSpec, layout: Layout, error: OutOfMemory) -> None:
    """Write the smaller micro-batch to the run folder for the next attempt, and mention it in the error."""
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
    log(f"out of memory: continuing with parallel.micro_batch={spec.parallel.micro_batch} ({RETRY_ORIGIN})")
