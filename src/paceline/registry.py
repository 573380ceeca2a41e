"""The table of workloads: what a short name in a run file stands for. Nothing of torch is imported here.

Three origins, one path: workloads that come with Paceline, those of installed packages (entry points of the group
`paceline.workloads`), and a user's own `file.py:Class`. Each is an `Entry`, whose parts are imported when needed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError, did_you_mean
from paceline.own_code import class_of, one_line

if TYPE_CHECKING:
    from paceline.section import RunClass, Section

GROUP = "paceline.workloads"
"""Of entry points. Each names an `Entry`, or a class that is one by itself."""
BUILT_IN = {
    "classifier": "paceline.workloads.classifier:ENTRY",
    "lm": "paceline.workloads.lm:ENTRY",
    "topics": "paceline.workloads.topics:ENTRY",
}
DEFAULT_WORKLOAD = "classifier"


@dataclass(frozen=True)
class Verb:
    """A command that a workload adds; `module` has `add_arguments(parser)` and `run(arguments, console) -> int`."""

    help: str
    module: str
    example: str = ""


@dataclass(frozen=True)
class Traits:
    """What a workload says of its model and samples, as far as it decides how a step runs."""

    equal_layers: bool = False
    """Many equal layers and samples of one shape: each layer is compiled by itself (`Workload.compile_layers`)."""
    few_shapes: bool = False
    """Batches can be brought to a few shapes (`Samples.fixed_shape_batches`): a step can be recorded."""


@dataclass(frozen=True)
class Entry:
    """All that the rest of Paceline knows of a workload. References are `module:name`, imported when first used."""

    run: str
    """The run class: model, data and loss, or passes."""
    model: str = ""
    """The sections of the run file; without them those of the run class."""
    data: str = ""
    subject: str = ""
    """What a plan prices, `subject(spec, samples, tokens)`; without it the model is measured on fake tensors."""
    batched: bool = True
    """See `RunClass.batched`."""
    traits: Traits = Traits()
    verbs: Mapping[str, Verb] = field(default_factory=dict)

    def sections(self) -> dict[str, type[Section]]:
        """The types of the sections `model` and `data`."""
        found = {name: getattr(self, name) for name in ("model", "data")}
        if all(found.values()):
            return {name: resolve(reference) for name, reference in found.items()}
        from paceline.section import Section

        kind = self.run_class()
        for name in ("Model", "Data"):
            section = getattr(kind, name)
            if not (isinstance(section, type) and issubclass(section, Section)):
                raise UserError(
                    f"workload: {kind.__name__}.{name} is {section!r}; it must be a subclass of paceline.spec.Section"
                )
        return {"model": kind.Model, "data": kind.Data}

    def run_class(self) -> type[RunClass]:
        """The class that trains or fits; the user's own code is executed here."""
        return _run_class(self.run)


def _run_class(reference: str) -> type[RunClass]:
    from paceline.section import RunClass

    return class_of(reference, RunClass)


def resolve(reference: str) -> Any:
    """The object behind `module:name`."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def entry_of(workload: Any) -> Entry:
    """The entry of a name, or of `file.py:Class`; a UserError says which names there are."""
    if isinstance(workload, str) and ":" in workload:
        return _own(workload)
    if isinstance(workload, str) and workload in BUILT_IN:
        return resolve(BUILT_IN[workload])
    if isinstance(workload, str) and workload in installed():
        return _loaded(installed()[workload])
    known = names()
    allowed = f"use one of {', '.join(known)} or file.py:Class"
    if not isinstance(workload, str):
        raise UserError(f"workload: {workload!r} is not a name; {allowed}")
    raise UserError(f"workload: {workload!r} is not known{did_you_mean(workload, known)}; {allowed}")


def _own(reference: str) -> Entry:
    """The entry of a run class that says all there is about itself."""
    kind = _run_class(reference)
    return Entry(reference, batched=kind.batched, traits=Traits(equal_layers=getattr(kind, "compile_layers", False)))


def names() -> list[str]:
    """Every short name: those that come with Paceline first, then those of installed packages."""
    return [*BUILT_IN, *(name for name in sorted(installed()) if name not in BUILT_IN)]


def verbs() -> dict[str, Verb]:
    """The commands that workloads add, by name. A package that cannot be imported adds none."""
    found: dict[str, Verb] = {}
    for name in names():
        try:
            found = {**entry_of(name).verbs, **found}
        except UserError:  # said when its name is used
            continue
    return found


@functools.cache
def installed() -> dict[str, metadata.EntryPoint]:
    """What installed packages add, by name."""
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _loaded(point: metadata.EntryPoint) -> Entry:
    try:
        found = point.load()
    except Exception as error:
        raise UserError(
            f"workload: {point.name!r} of {_package(point)} fails when it is imported: {one_line(error)}"
        ) from error
    if isinstance(found, Entry):
        return found
    try:
        return _own(point.value)
    except UserError:
        raise UserError(
            f"workload: {point.name!r} of {_package(point)} is {point.value}, which is neither a Workload class "
            "nor a paceline.registry.Entry"
        ) from None


def _package(point: metadata.EntryPoint) -> str:
    return f"the installed package {point.dist.name!r}" if point.dist is not None else "an installed package"
