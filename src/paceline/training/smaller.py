"""`train.on_oom: retry`: a run that found no memory goes on in passes of half as many samples, with the same answer."""

from __future__ import annotations

import gc
import sys

from paceline.errors import OutOfMemory
from paceline.layout import layout_of
from paceline.record.run_dir import RunDir
from paceline.registry import entry_of
from paceline.spec import RunSpec
from paceline.workload import Say

OURS = "train.on_oom=retry"


def halved(spec: RunSpec, error: Exception) -> RunSpec | None:
    """The run as it goes on after this error; None where it does not."""
    asked = spec.train.on_oom == "retry" and entry_of(spec.workload).batched
    if not asked or not isinstance(error, OutOfMemory) or not error.certain:
        return None
    micro_batch = layout_of(spec).micro_batch
    return spec.replace({"parallel.micro_batch": micro_batch // 2}, OURS) if micro_batch > 1 else None


def go_on(run: RunDir, spec: RunSpec, say: Say) -> None:
    """Free what the failed attempt held in this process, and write down how the run goes on."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    run.rewrite(spec)
    layout = layout_of(spec)
    say(f"there was no memory left: going on with parallel.micro_batch={layout.micro_batch} ({OURS})")
