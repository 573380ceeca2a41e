"""The verb `measure` for commands: one command on several numbers of ranks, as it is, and what was seen of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import RunFailed
from paceline.measuring.outside.command import MeasuredCommand, command_of
from paceline.measuring.outside.process import run_noted
from paceline.measuring.outside.reading import OUTPUT, last_words, read_seen
from paceline.measuring.outside.request import Request
from paceline.measuring.reading import RunTimes
from paceline.measuring.result import Measurement, concluded
from paceline.measuring.rows import BatchLayout, MeasuredRow, done
from paceline.measuring.turns import (
    REPEATS,
    STEPS,
    State,
    Trial,
    rates_of,
    rows_of,
    swept,
    written,
)
from paceline.measuring.words import FROM_OUTSIDE
from paceline.workload import Say

SAME = 0.02
"""Batches that differ by less are the same: the last one of an epoch may be shorter."""


@dataclass(frozen=True)
class CommandTrial(Trial):
    """A number of ranks to start the command on."""

    label: str
    ranks: int
    command: MeasuredCommand
    steps: int
    steps_by: str = ""
    say: Say = field(default=lambda text: None, compare=False)

    @property
    def batch(self) -> BatchLayout:
        return BatchLayout()

    def run(self, path: Path) -> RunTimes:
        path.mkdir()
        request = Request(str(path.resolve()), self.steps, self.ranks, self.steps_by)
        code = run_noted(self.command.on(self.ranks), request, path / OUTPUT)
        try:
            return read_seen(path, request, code)
        except RunFailed:
            self.say("\n".join(last_words(path / OUTPUT)))
            raise


def measure_command(
    words: Sequence[str],
    ranks: Sequence[int] = (1, 2),
    *,
    out: str | Path | None = None,
    say: Say = lambda text: None,
    steps: int = STEPS,
    repeats: int = REPEATS,
    **options: Any,
) -> Measurement:
    """Start a command on each number of ranks, several times, end it after some steps, and sum up what was seen.

    `{ranks}` in a word stands for the number of ranks; a command without it is started once for each rank. Options:
    `steps_by`, the optimiser whose steps count where there are several; `price` in USD per device and hour; `retry`
    what failed before. The folder `out` (runs/NAME-measure) holds measure.json and what the script printed.
    """
    command = command_of(words, ranks)
    steps_by = options.get("steps_by") or ""
    wanted = [CommandTrial(f"{n} rank{'s' * (n > 1)}", n, command, steps, steps_by, say) for n in sorted(ranks)]
    folder = Path(out) if out is not None else Path("runs") / f"{command.name}-measure"
    begun: State = {"name": command.name, "steps": steps, "spec": {}, "command": list(words), "steps_by": steps_by}
    retry = options.get("retry", False)
    with swept(folder, begun, _compared, wanted, repeats=repeats, retry=retry, say=say) as (state, times):
        rows = rows_of(wanted, state, times)
        state["kind"] = kind_of(done(rows))
        found = concluded(folder, state, rows, rates_of(times), None, options.get("price"), {})
        seen = [run for runs in times.values() for run in runs.values()]
        return written(replace(found, notes=(*notes(seen, steps), *found.notes)), state)


def _compared(state: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: state.get(key) for key in ("name", "steps", "steps_by")}
    return {"command": shlex.join(state.get("command", ())), **values}


def kind_of(rows: Sequence[MeasuredRow]) -> str:
    """Whether the script does the same work in a step on all rows, or more with more ranks."""
    if len(rows) < 2:
        return "strong"
    batches = [row.batch.global_batch for row in rows]
    known = [batch for batch in batches if batch]
    if len(known) < len(batches):
        return "weak"
    return "strong" if max(known) <= (1 + SAME) * min(known) else "weak"


def notes(runs: Sequence[RunTimes], steps: int) -> list[str]:
    """What a reader should know of numbers that were seen from outside."""
    found = [f"{FROM_OUTSIDE} Loss, layout and evaluations are not known, and runs are ended after {steps} steps."]
    if not all(run.seen.rank_batches for run in runs):
        found.append(
            "No DataLoader was seen, so the samples of a step are not known, and waiting for input counts as compute. "
            "The step of a rank counts as one sample; if the script divides one batch among its ranks, divide the "
            "speed-ups by the ranks."
        )
    if any(len(run.busy_s_by_rank) > 1 and not run.parts.comm_s for run in runs):
        found.append(
            "Several ranks ran, and no communication of theirs was seen: each trains by itself, or gradients are "
            "exchanged in a way that cannot be seen, as in compiled graphs. A speed-up means little then."
        )
    if any(run.seen.aside for run in runs):
        found.append(
            "Collectives ran in streams of their own, as those of FSDP do: what is exposed of them counts as compute."
        )
    return found
