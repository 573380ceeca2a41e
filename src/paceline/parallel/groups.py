"""Groups of parameters: a pattern of their names, and what is different for those that it matches.

The run file's patterns come first, then those of `Workload.groups`; the first that matches a name decides. The group
of a parameter follows from its name alone, so it is the same whatever part of the model a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError
from torch import nn

from paceline.errors import UserError, did_you_mean
from paceline.spec import ParameterGroup, Train
from paceline.workload import Workload

REST = ParameterGroup()
"""Of parameters that no pattern names: all is as the section `train` says."""


@dataclass(frozen=True)
class Groups:
    """Patterns, in the order in which they are tried."""

    table: Mapping[str, ParameterGroup] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Parameters of the whole model by pattern; "" are those that no pattern names."""
    frozen: int = 0
    """Parameters that are not trained, by a pattern or by the model itself."""

    def pattern(self, name: str) -> str:
        """The one that decides for a parameter; "" where none names it."""
        return next((pattern for pattern in self.table if fnmatchcase(name, pattern)), "")

    def __getitem__(self, pattern: str) -> ParameterGroup:
        return self.table.get(pattern, REST)

    def freeze(self, model: nn.Module) -> None:
        """For a model, or for some of its layers."""
        for name, p in model.named_parameters():
            if self[self.pattern(name)].frozen:
                p.requires_grad_(False)

    def words(self) -> Iterator[str]:
        """A line for each group, for people."""
        for pattern, group in self.table.items():
            given = {"lr": group.lr, "weight_decay": group.weight_decay}
            changes = [f"{key} {value:g}" for key, value in given.items() if value is not None]
            said = "frozen" if group.frozen else ", ".join(changes) or "as the rest"
            yield f"{self.sizes[pattern]:,} parameters {pattern!r}: {said}"
        if self.frozen:
            total = sum(self.sizes.values())
            yield f"{total - self.frozen:,} parameters to train = {total:,} - {self.frozen:,} frozen"


def groups_of(workload: Workload, train: Train, model: nn.Module) -> Groups:
    """The groups of a whole model, of which they freeze what is to be frozen.

    A pattern that decides for no parameter is refused, and a model of which nothing is left to train.
    """
    names, said = [name for name, _ in model.named_parameters()], Groups(train.groups)
    table = {**train.groups, **_own(workload, model), **train.groups}
    for pattern in [pattern for pattern in table if pattern not in train.groups]:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if matched and all(map(said.pattern, matched)):  # the run file says something else of all of them
            del table[pattern]
    groups = Groups(table)
    sizes = dict.fromkeys([*table, ""], 0)
    for name, p in model.named_parameters():
        sizes[groups.pattern(name)] += p.numel()
    for pattern in table:
        if not pattern or not sizes[pattern]:
            _refuse(pattern, groups, names)
    groups.freeze(model)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    if frozen == sum(sizes.values()):
        kind = f"the model ({type(model).__name__})"
        what = f"all {frozen:,} parameters of {kind} are frozen" if frozen else f"{kind} has no parameters"
        raise UserError(f"workload: {what}; there must be one to train")
    return Groups(table, sizes, frozen)


def _own(workload: Workload, model: nn.Module) -> dict[str, ParameterGroup]:
    """What the workload says beside the run file."""
    found: Any = workload.groups(model)
    if not isinstance(found, Mapping):
        raise UserError(
            f"workload: groups(model) returned {type(found).__name__}; it must return a dict as in the run file, "
            '{"encoder.*": {"lr": 1e-4}}'
        )
    groups = {}
    for pattern, values in found.items():
        try:
            groups[str(pattern)] = ParameterGroup.model_validate(values)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise UserError(f"workload: groups(model): {pattern!r}: {key}: {problem['msg']}") from None
    return groups


def _refuse(pattern: str, groups: Groups, names: list[str]) -> None:
    if first := next((groups.pattern(name) for name in names if fnmatchcase(name, pattern)), ""):
        raise UserError(
            f"train.groups: all that {pattern!r} matches is matched by {first!r} before it; "
            "the first pattern decides, so put the narrower one first"
        )
    near = did_you_mean(pattern, [f"{name.rpartition('.')[0]}.*" for name in names] + names, cutoff=0.65)
    raise UserError(
        f"train.groups: no parameter has a name like {pattern!r}{near or '; names are ' + ', '.join(names[:6])}"
        + (" …" if not near and len(names) > 6 else "")
    )
