"""Read the times of one run: medians over its steady steps, its rate, its memory, and the work of each rank."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import UserError
from paceline.runlog.events import read_steps
from paceline.runlog.run_dir import RunDir
from paceline.runlog.summary import average_rounds, compute_median_rate, drop_warmup_steps, read_summary
from paceline.runlog.timers import TIMES

MOST_STEPS = 2000
ROUNDS = 4  # of all workers, for a median
MOST_RANKS = 64
Step = Mapping[str, Any]


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by what a rank does; `comm_s` overlaps the others, and its exposed part is one of them."""

    data_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    waiting_s: float  # part of exposed_s, for a slower rank

    @property
    def travelling_s(self) -> float:
        return max(0.0, self.exposed_s - self.waiting_s)


@dataclass(frozen=True)
class ObservedScript:
    from_outside: bool = False
    rank_batches: tuple[int, ...] = ()  # empty without a DataLoader
    aside: bool = False  # collectives had their own stream
    ddp: bool = False  # gradients were summed by DistributedDataParallel


@dataclass(frozen=True)
class RunTimes:
    """Medians over the steady steps of one run; times are means over its ranks."""

    steps: int
    step_s: float
    parts: StepParts
    samples_per_s: float
    tokens_per_s: float | None
    busy_s_by_rank: tuple[float, ...]  # input and compute
    peak_bytes_per_rank: tuple[int, ...]
    compiled_steps: int = 0
    compiled_s: float = 0.0  # not in any median
    loss_last: float | None = None
    parameters: int | None = None
    threads: int | None = None
    workers: int | None = None
    load_s: float | None = None  # of one worker, for a step
    documents: int | None = None  # of a pass, in a fit
    device: str | None = None
    device_ranks: int = 1  # that share a device
    began: float | None = None
    ended: float | None = None
    seen: ObservedScript = ObservedScript()


def read_run_times(run: RunDir, of_main: Sequence[Step] | None = None, skip: int = 0) -> RunTimes:
    """Read the times of a finished run; raise UserError if it has too few steps.

    `of_main` are the steps of the main rank, if they have been read already; steps up to number `skip` do not count.
    """
    summary = read_summary(run.summary_file)
    files = [run.events_file(rank) for rank in range(min(summary.ranks or 1, MOST_RANKS))]
    main = read_steps(files[0], 4 * MOST_STEPS) if of_main is None else of_main
    every = (main, *(read_steps(file, 4 * MOST_STEPS) for file in files[1:]))
    by_rank = [[step for step in steps if step["step"] > skip] for steps in every]
    found = compute_run_times(run, by_rank, summary.peak_bytes_per_rank)
    return replace(found, loss_last=summary.loss_last, parameters=summary.parameters)


def compute_run_times(
    run: RunDir, steps_by_rank: Sequence[Sequence[Step]], peak_bytes_per_rank: tuple[int, ...]
) -> RunTimes:
    """Compute the times of steps, given by rank; the "batch" of the main rank's steps is that of all ranks."""
    by_rank: list[Sequence[Step]] = [found for steps in steps_by_rank if (found := select_steady_steps(steps))] or [[]]
    start = run.start()
    workers = start.get("workers")
    if len(by_rank[0]) >= ROUNDS * (workers or 1):
        by_rank = [average_rounds(steps, workers or 1) for steps in by_rank]
    first = by_rank[0]
    rate = compute_median_rate(first, "batch")
    if len(first) < 2 or rate is None:
        raise UserError(f"{run.path} has {len(first)} steps after its warm-up; too few to measure")
    common = _align_ranks(by_rank)
    device, local_ranks = find_cuda_device(start), int(start.get("local_ranks") or 1)
    compiled = [float(step["step_s"]) for step in steps_by_rank[0] if step.get("compiled")]
    return RunTimes(
        steps=len(first),
        step_s=statistics.median(_average_ranks(common, "step_s")),
        parts=_compute_parts(common),
        samples_per_s=rate,
        tokens_per_s=compute_median_rate(first, "tokens"),
        busy_s_by_rank=tuple(
            statistics.median(float(step["compute_s"] + step["data_s"]) for step in steps)
            for steps in zip(*common, strict=True)
        ),
        peak_bytes_per_rank=peak_bytes_per_rank,
        compiled_steps=len(compiled),
        compiled_s=math.fsum(compiled),
        threads=start.get("threads"),
        workers=workers,
        load_s=statistics.median(_average_ranks(common, "load_s")) if "load_s" in first[0] else None,
        documents=first[0]["batch"] if "of_samples" in first[0] else None,
        device=device,
        device_ranks=1 if device is None else max(1, -(-local_ranks // len(start["gpus"]))),
        began=first[0].get("t"),
        ended=first[-1].get("t"),
    )


def find_cuda_device(start: Mapping[str, Any]) -> str | None:
    kind, _, index = str(start.get("device") or "").partition(":")
    names = start.get("gpus") or []
    place = int(index) if re.fullmatch("[0-9]{1,9}", index) else 0
    return str(names[place]) if kind == "cuda" and place < len(names) else None


def select_steady_steps(steps: Sequence[Step]) -> list[Step]:
    return [s for s in drop_warmup_steps(steps)[-MOST_STEPS:] if None not in [s.get(name) for name in TIMES]]


def _align_ranks(by_rank: Sequence[Sequence[Step]]) -> list[list[Step]]:
    numbered = [{step["step"]: step for step in steps} for steps in by_rank]
    shared = sorted(set.intersection(*(set(steps) for steps in numbered)))
    return [[steps[number] for steps in numbered] for number in shared] or [[step] for step in by_rank[0]]


def _compute_parts(common: Sequence[Sequence[Step]]) -> StepParts:
    """Compute the parts of a step: what all ranks spend in a collective is sending, the rest waiting for the others."""
    waits = [
        mean - min(event["exposed_s"] for event in events)
        for mean, events in zip(_average_ranks(common, "exposed_s"), common, strict=True)
    ]
    found = {name: statistics.median(_average_ranks(common, name)) for name in TIMES if name != "step_s"}
    return StepParts(**found, waiting_s=statistics.median(waits))


def _average_ranks(common: Sequence[Sequence[Step]], name: str) -> list[float]:
    """Return the mean over the ranks of each step; `statistics.fmean` takes three times as long for a few values."""
    return [math.fsum(event[name] for event in events) / len(events) for events in common]
