"""What a sweep trains: for each row, the run file under another layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError
from paceline.layout import SPREADING, from_words, layout_of
from paceline.parity import PLAIN
from paceline.registry import entry_of
from paceline.spec import RunSpec

NEVER = 1 << 30
STEPS: int = 30
REPEATS: int = 3


@dataclass(frozen=True)
class RefusedTrial:
    """A layout that cannot be, and why."""

    label: str
    ranks: int
    refused: str


@dataclass(frozen=True)
class Trial:
    """A layout to train, which becomes a row."""

    label: str
    ranks: int
    spec: RunSpec

    def run_name(self, repeat: int) -> str:
        return f"{re.sub('[^A-Za-z0-9.]+', '-', self.label)}-{repeat + 1}"


AnyTrial = Trial | RefusedTrial


def trials(spec: RunSpec, ranks: Sequence[int], layouts: Sequence[str], steps: int, weak: bool) -> list[AnyTrial]:
    """One for each number of ranks and each short form of a layout, fewest ranks first."""
    if weak and not entry_of(spec.workload).batched:
        raise UserError("--weak: a fit passes over all of its documents, on any number of ranks; leave --weak out")
    wanted: list[tuple[str, dict[str, Any]]] = [
        (f"{n} rank{'s' * (n > 1)}", {"ranks": n} if n > 1 else {"strategy": "auto", **_plain()}) for n in ranks
    ]
    wanted += [(word, {"strategy": "auto", **_plain(), **from_words(word)}) for word in layouts]
    if min((values["ranks"] for _, values in wanted), default=0) != 1:
        given = f"--ranks {','.join(map(str, ranks))}" if ranks else f"--layouts {','.join(layouts)}"
        raise UserError(f"speed-up is counted from one rank, and {given} has none; write it as  --ranks 1,2,4")
    return sorted((_trial(spec, label, values, steps, weak) for label, values in wanted), key=lambda trial: trial.ranks)


def _plain() -> dict[str, Any]:
    """The values of one rank alone; the size of a pass stays as the run file has it."""
    return {name: getattr(PLAIN, name) for name in SPREADING if name != "micro_batch"}


def _trial(spec: RunSpec, label: str, parallel: dict[str, Any], steps: int, weak: bool) -> AnyTrial:
    length: dict[str, Any] = {
        "train.epochs": None,
        "train.steps": steps,
        "train.loggers": [],
        "train.evaluate_every": NEVER,
        "train.checkpoint_every": NEVER,
        "train.keep": 1,
    }
    try:
        found = spec.replace({**length, **{f"parallel.{name}": value for name, value in parallel.items()}})
        if weak:
            batch = spec.train.global_batch * found.parallel.ranks // (found.parallel.tensor * found.parallel.pipeline)
            found = found.replace({"train.global_batch": batch})
        layout_of(found)
    except UserError as error:
        return RefusedTrial(label, int(parallel["ranks"]), str(error))
    return Trial(label, found.parallel.ranks, found)
