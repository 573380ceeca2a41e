"""`train.on_oom: retry`: a run that found no memory goes on in passes of half as many samples, with the same answer.

Ranks that we start, we start again. Those of another launcher leave it in the run's folder for who starts them again.
"""

from __future__ import annotations

import gc
import sys

from paceline.config import RunSpec
from paceline.config.registry import find_entry
from paceline.errors import OutOfMemory
from paceline.layout import layout_of
from paceline.runlog.run_dir import RunDir
from paceline.workload import LogFn

RETRY_ORIGIN = "train.on_oom=retry"


def halve_micro_batch(spec: RunSpec, error: Exception) -> RunSpec | None:
    """The run as it goes on after this error; None where it does not."""
    asked = spec.train.on_oom == "retry" and find_entry(spec.workload).batched
    if not asked or not isinstance(error, OutOfMemory) or not error.certain:
        return None
    micro_batch = layout_of(spec).micro_batch
    return spec.replace({"parallel.micro_batch": micro_batch // 2}, RETRY_ORIGIN) if micro_batch > 1 else None


def record_retry(run: RunDir, spec: RunSpec, error: OutOfMemory) -> None:
    """By a rank that found no memory: the next attempt is told by the folder, and the user by the error."""
    if (smaller := halve_micro_batch(spec, error)) is not None and run.spec_file.is_file():
        run.rewrite(smaller)
        words = f"started again, it goes on with parallel.micro_batch={smaller.parallel.micro_batch} ({RETRY_ORIGIN})"
        error.args = (f"{error}\n  {words}",)


def apply_recorded_retry(run: RunDir, spec: RunSpec) -> RunSpec:
    """The run in the passes that an attempt before this one has left for it."""
    before = run.recorded_spec()
    left = before.parallel.micro_batch
    if spec.train.on_oom != "retry" or before.origin("parallel.micro_batch") != RETRY_ORIGIN or left is None:
        return spec
    return spec.replace({"parallel.micro_batch": left}, RETRY_ORIGIN) if left < layout_of(spec).micro_batch else spec


def prepare_retry(run: RunDir, spec: RunSpec, say: LogFn) -> None:
    """Free what the failed attempt held in this process, and write down how the run goes on."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    run.rewrite(spec)
    layout = layout_of(spec)
    say(f"there was no memory left: going on with parallel.micro_batch={layout.micro_batch} ({RETRY_ORIGIN})")
