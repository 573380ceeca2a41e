"""Measure an unmodified command on several numbers of ranks, from the steps that its processes recorded."""

import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UserError
from paceline.io.format import plural
from paceline.launch.root_cause import SECONDARY_ERROR_PATTERN
from paceline.measurement.diagnosis import FROM_OUTSIDE
from paceline.measurement.measure import REPEATS, STEPS
from paceline.measurement.progress import (
    MeasureTrial,
    build_rows,
    collect_times,
    complete_runs,
    write_measurement,
)
from paceline.measurement.result import Measurement, build_measurement
from paceline.measurement.rows import drop_failed
from paceline.measurement.run_times import MOST_RANKS, ObservedScript, RunTimes, compute_run_times
from paceline.measurement.scripts.command import RecordRequest, check_command, run_recorded
from paceline.runlog.events import drop_undone_steps, read_events
from paceline.runlog.run_dir import RunDir
from paceline.trials.runner import AbortTrials
from paceline.workload import LogFn

OUTPUT = "output.txt"
SHOWN_LINES = 15
OF_LAUNCHERS = "ChildFailedError|CalledProcessError"
ERROR = re.compile(rf"(\[rank\d+\]: *)?(?!.*({OF_LAUNCHERS}))[\w.]*(Error|Exception|Interrupt)(: |$)")
"""The last line of a traceback, except of those that launchers add."""
OF_OUR_LAUNCHER = "paceline: rank "
ENDED_EARLY = 5  # of a script that ended early
Event = Mapping[str, Any]


def read_script_times(path: Path, request: RecordRequest, code: int) -> RunTimes:
    run = RunDir(path)
    by_rank = [list(read_events(run.events_file(rank))) for rank in range(min(request.ranks, MOST_RANKS))]
    main = by_rank[0]
    if refused := next((event for events in by_rank for event in events if event["kind"] == "refused"), None):
        raise UserError(refused["why"])
    end = next((event for event in main if event["kind"] == "end"), {})
    if code and end.get("status") != "measured":
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        lines = extract_error_lines(path / OUTPUT)
        failed = explain_missing_device(lines) or f"the command failed with {how}: {lines[-1]}"
        raise RunFailed(f"{failed}; see {path / OUTPUT}")
    steps = [drop_undone_steps(events) for events in by_rank]
    if missing := [str(rank) for rank, found in enumerate(steps) if not found]:
        if any(steps):
            raise UserError(f"rank {', '.join(missing)} made no training step, and others did; {quote_output(path)}")
        raise AbortTrials(f"the script ended without a training step of a torch optimiser; {quote_output(path)}")
    if len(steps[0]) < min(ENDED_EARLY, request.steps):
        ended = f"the script ended after {len(steps[0]) + 1} steps of {request.steps + 1}"
        raise AbortTrials(f"{ended}; let it run longer, with more epochs or data; {quote_output(path)}")
    for rank, every in enumerate(steps):  # an evaluation inside makes a step longer, and loads other samples
        kept = [event for event in every if not event.get("evaluated")]
        steps[rank] = kept if len(kept) >= ENDED_EARLY else every
    medians = tuple(round(statistics.median(event["rank_batch"] for event in of_rank)) for of_rank in steps)
    batch = sum(medians) or request.ranks  # if it is not known, the step of a rank counts as one sample
    together = [[{**event, "batch": batch} for event in of_rank] for of_rank in steps]
    ends = [event for events in by_rank for event in events if event["kind"] == "end"]
    aside, ddp = (any(event.get(name) for event in ends) for name in ("aside", "ddp"))
    seen = ObservedScript(True, medians if any(medians) else (), aside, ddp)
    return replace(compute_run_times(run, together, tuple(event["peak_bytes"] for event in ends)), seen=seen)


def extract_error_lines(output: Path) -> list[str]:
    """Return the last lines up to the error that a command ended with; launchers and peers may print more after it."""
    lines = output.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() or ["it printed nothing"]
    errors = [i for i, line in enumerate(lines) if ERROR.match(line)]
    causes = [i for i in errors if not SECONDARY_ERROR_PATTERN.search(lines[i])]
    others = [i for i, line in enumerate(lines) if not line.startswith(OF_OUR_LAUNCHER)]
    at = (causes or errors or others or [0])[-1]
    return lines[max(0, at + 1 - SHOWN_LINES) : at + 1]


def quote_output(path: Path) -> str:
    """Return the last line that a script printed, and the name of its log."""
    return f"its last line: {extract_error_lines(path / OUTPUT)[-1]:.200}; see {path / OUTPUT}"


NO_DEVICE = re.compile(
    r"NCCL is only supported with GPUs|doesn't have NCCL built in|[Nn]o CUDA GPUs|"
    r"invalid device ordinal|Found no NVIDIA driver|not compiled with CUDA|CUDA is not available|no CUDA-capable"
)


def explain_missing_device(lines: Sequence[str]) -> str:
    """Return what to do if a script failed because this machine lacks the CUDA devices that it wants, else ""."""
    if not any(NO_DEVICE.search(line) for line in lines):
        return ""
    import torch

    count = torch.cuda.device_count()
    has = f"{plural(count, 'CUDA device')}; use  --ranks {count}" if count else "none"
    cpu = "to try it on CPU, let it use  init_process_group('gloo')  and  torch.device('cpu')"
    return f"the script wants a CUDA device or nccl, and this machine has {has}; {cpu}"


SAME_BATCH = 0.02  # the last batch may be shorter


def _run_and_read(words: Sequence[str], request: RecordRequest, log: LogFn, path: Path) -> RunTimes:
    path.mkdir()
    request = replace(request, folder=str(path.resolve()))
    code = run_recorded(words, request, path / OUTPUT)
    try:
        return read_script_times(path, request, code)
    except RunFailed:
        log("\n".join(extract_error_lines(path / OUTPUT)))
        raise


def measure_command(
    words: Sequence[str],
    ranks: Sequence[int] = (1, 2),
    *,
    out: str | Path | None = None,
    log: LogFn = lambda text: None,
    steps: int = STEPS,
    repeats: int = REPEATS,
    price: float | None = None,
    retry: bool = False,
) -> Measurement:
    """Start a command on each number of ranks, several times, end it after some steps, and sum up what was seen.

    `{ranks}` in a word becomes the number of ranks; a command without it is started once for each rank. `price` is in
    USD per device and hour; `retry` what failed before. The folder `out` (runs/NAME-measure) holds measure.json and
    what the script printed.
    """
    command = check_command(words, ranks)
    trials = []
    for n in sorted(ranks):
        run = partial(_run_and_read, command.on(n), RecordRequest("", steps, n), log)
        trials.append(MeasureTrial(plural(n, "rank"), n, run))
    folder = Path(out or f"runs/{command.name}-measure")
    request: dict[str, Any] = {"name": command.name, "steps": steps, "spec": {}, "command": list(words)}
    with complete_runs(folder, trials, repeats, request, _select_comparable, retry, log) as state:
        rows = build_rows(trials, state)
        batches = [row.batch.global_batch or 0 for row in drop_failed(rows)]
        same = len(batches) < 2 or 0 < max(batches) <= (1 + SAME_BATCH) * min(batches)
        state["kind"] = "strong" if same else "weak"
        found = build_measurement(folder, state, rows, None, price, {})
        seen = [run for runs in collect_times(state).values() for run in runs.values()]
        return write_measurement(replace(found, notes=(*collect_script_notes(seen, steps), *found.notes)), state)


def _select_comparable(state: Mapping[str, Any]) -> dict[str, Any]:
    return {"command": shlex.join(state.get("command", ())), "name": state.get("name"), "steps": state.get("steps")}


NO_SAMPLES = (
    "No DataLoader was seen: waiting for input counts as compute, and the step of a rank as one sample; if the script "
    "divides one batch among its ranks, divide the speed-ups by the ranks."
)
NO_COMMUNICATION = (
    "Several ranks ran, and no communication between them was seen: each trains alone, or gradients are exchanged in a "
    "way that cannot be seen, as in compiled graphs. A speed-up means little then."
)
ASIDE = "Collectives ran in their own streams, as those of FSDP do: their exposed part counts as compute."


def collect_script_notes(runs: Sequence[RunTimes], steps: int) -> list[str]:
    notes = {
        NO_SAMPLES: not all(run.seen.rank_batches for run in runs),
        NO_COMMUNICATION: any(len(run.busy_s_by_rank) > 1 and not run.parts.comm_s for run in runs),
        ASIDE: any(run.seen.aside for run in runs),
    }
    first = f"{FROM_OUTSIDE} Loss, layout and evaluations are not known, and runs are ended after {steps} steps."
    return [first, *(note for note, holds in notes.items() if holds)]
