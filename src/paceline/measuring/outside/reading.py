"""What the processes of a command noted, as the times of a run; or in one sentence why there are none."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed, UserError
from paceline.launch.blame import ECHO_WORDS
from paceline.measuring.outside.request import Request
from paceline.measuring.reading import MOST_RANKS, RunTimes, Seen, times_of
from paceline.measuring.turns import WrongForAll
from paceline.record.events import read_events, steps_that_count
from paceline.record.run_dir import RunDir

OUTPUT = "output.txt"
"""What the command printed."""
SHOWN_LINES = 15
OF_LAUNCHERS = "ChildFailedError|CalledProcessError"
ERROR = re.compile(rf"(\[rank\d+\]: *)?(?!.*({OF_LAUNCHERS}))[\w.]*(Error|Exception|Interrupt)(: |$)")
"""The last line of a traceback, but not of those that launchers add."""
OF_OUR_LAUNCHER = "paceline: rank "
ENDED_EARLY = 5
"""Steps that a script must have made, if it ended before those that were asked for."""
Event = Mapping[str, Any]


def read_seen(path: Path, request: Request, code: int) -> RunTimes:
    """The times of a command that ended with `code`."""
    run = RunDir(path)
    by_rank = [list(read_events(run.events_file(rank))) for rank in range(min(request.ranks, MOST_RANKS))]
    main = by_rank[0]
    if refused := next((event for events in by_rank for event in events if event["kind"] == "refused"), None):
        raise (WrongForAll if refused["on_any_ranks"] else UserError)(refused["why"])
    end = next((event for event in main if event["kind"] == "end"), {})
    if code and end.get("status") != "measured":
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise RunFailed(f"the command failed with {how}: {last_words(path / OUTPUT)[-1]}; see {path / OUTPUT}")
    steps = [steps_that_count(events) for events in by_rank]
    if missing := [str(rank) for rank, found in enumerate(steps) if not found]:
        if any(steps):
            raise UserError(f"rank {', '.join(missing)} made no step that could be seen, and others did")
        raise WrongForAll(_without_steps(request, end))
    if len(steps[0]) < min(ENDED_EARLY, request.steps):
        raise WrongForAll(
            f"the script ended after {len(steps[0]) + 1} steps of {request.steps + 1}; let it run longer, with more "
            "epochs or data"
        )
    rank_batches = _rank_batches(steps)
    together = [_with_batch(of_rank, rank_batches, request.ranks) for of_rank in steps]
    ends = [event for events in by_rank for event in events if event["kind"] == "end"]
    seen = Seen(True, rank_batches, any(event.get("aside") for event in ends))
    return replace(times_of(run, together, tuple(event["peak_bytes"] for event in ends)), seen=seen)


def _rank_batches(steps: Sequence[Sequence[Event]]) -> tuple[int, ...]:
    """Samples of a usual step of each rank: gradients may be accumulated over several batches, which add up."""
    found = tuple(round(statistics.median(event["rank_batch"] for event in of_rank)) for of_rank in steps)
    return found if any(found) else ()


def _with_batch(steps: Sequence[Event], rank_batches: Sequence[int], ranks: int) -> list[Event]:
    """The step of a rank counts as one sample where nobody knows."""
    return [{**event, "batch": sum(rank_batches) or ranks} for event in steps]


def last_words(output: Path) -> list[str]:
    """What a command printed up to the error that it ended with: its launcher may have said more after it, and so may
    ranks that only lost a peer."""
    lines = output.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() or ["it printed nothing"]
    errors = [i for i, line in enumerate(lines) if ERROR.match(line)]
    causes = [i for i in errors if not ECHO_WORDS.search(lines[i])]
    others = [i for i, line in enumerate(lines) if not line.startswith(OF_OUR_LAUNCHER)]
    at = (causes or errors or others or [0])[-1]
    return lines[max(0, at + 1 - SHOWN_LINES) : at + 1]


def _without_steps(request: Request, end: Event) -> str:
    if names := end.get("optimizers"):
        return f"--steps-by {request.steps_by}: no optimiser of that name made two steps; there are {', '.join(names)}"
    return (
        "no optimiser of torch made two steps in any process of the command: either the script makes none, or its "
        "Python does not read PYTHONPATH (python -I, -E or -S, a container)"
    )
