"""A run that goes on beyond its first length: on the same order of samples, under the schedule of the new length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import UserError
from paceline.record.files import MOST_DIGITS
from paceline.record.run_dir import RunDir
from paceline.registry import entry_of
from paceline.spec import RunSpec, Train

LENGTHS = ("train.epochs", "train.steps")
EXTENDED = "extended from "


def length_of(train: Train) -> tuple[str, int]:
    """(the field that gives it, its value)"""
    return ("train.steps", train.steps) if train.steps else ("train.epochs", train.epochs or 1)


def counted(old: RunSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a resumed run in which `+2` is the length that it makes."""
    key, length = length_of(old.train)
    found = dict(given)
    for name in LENGTHS:
        value = given.get(name)
        if not (isinstance(value, str) and value.startswith("+")):
            continue
        if not value[1:].isdecimal() or int(value) < 1:
            raise UserError(f"{name}={value}: this is not a number of {name[6:]} to add; type  {key}=+2")
        if name != key:
            raise UserError(f"{name}={value}: the length of this run is {key}={length}; add to that, as in  {key}=+2")
        found[name] = length + int(value)
    return found


@dataclass(frozen=True)
class Extension:
    key: str
    before: int
    now: int
    old: Train
    """As the run was planned last."""

    def __str__(self) -> str:
        return f"{self.key} is {self.now} instead of {self.before}"


def extension_of(run: RunDir, spec: RunSpec) -> Extension | None:
    """What a spec adds to the length of the run in a folder. It must not be shorter, nor count otherwise."""
    old = run.recorded_spec()
    (key, before), (new_key, now) = length_of(old.train), length_of(spec.train)
    entry = entry_of(spec.workload)
    if (key, before) == (new_key, now) or not (entry.batched or entry.extends):
        return None
    if key != new_key:
        raise UserError(
            f"{run.path} has {key}={before}, and {new_key}={now} counts otherwise; to go on for longer, add to what it "
            f"has, as in  {key}=+2"
        )
    if now < before:
        raise UserError(
            f"{run.path} has {key}={before} and cannot become shorter ({key}={now}); to go on for longer, add to it, "
            f"as in  {key}=+2"
        )
    return Extension(key, before, now, old.train)


def write_longer(run: RunDir, extension: Extension) -> None:
    """The run's own spec says the new length, and what it was before."""
    run.rewrite(run.recorded_spec().replace({extension.key: extension.now}, f"{EXTENDED}{extension.before}"))


def extended_from(origin: str) -> int:
    """The length that a run had before, by what its spec says of it; -1 where it was never made longer."""
    before = origin.removeprefix(EXTENDED)
    return int(before) if origin != before and before.isdecimal() and len(before) < MOST_DIGITS else -1
