"""The table of workloads: what a short name in a run file stands for. Nothing of torch is imported here.

Four origins, one path: workloads that come with Paceline, those of installed packages (entry points of the group
`paceline.workloads`), a user's own `file.py:Class`, and a script `train.py` that has its loop itself. Each is an
`WorkloadEntry`, whose parts are imported when needed.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import traceback
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from paceline.config.sections import RunClass, Section

GROUP = "paceline.workloads"
"""Of entry points. Each names an `WorkloadEntry`, or a class that is one by itself."""
BUILT_IN = {
    "classifier": "paceline.workloads.classifier:ENTRY",
    "ensemble": "paceline.workloads.ensemble:ENTRY",
    "keras": "paceline.workloads.keras:ENTRY",
    "lm": "paceline.workloads.lm:ENTRY",
    "topics": "paceline.workloads.topics:ENTRY",
    "transformers": "paceline.workloads.transformers:ENTRY",
    "trees": "paceline.workloads.trees:ENTRY",
    "unet": "paceline.workloads.unet:ENTRY",
}
DEFAULT_WORKLOAD = "classifier"
SCRIPT = "paceline.script:ENTRY"
"""Of every script."""
USER_CODE_LOGGER = "paceline.user_code"


@dataclass(frozen=True)
class Verb:
    """A command. The references `module:name` are imported when its name is typed."""

    help: str
    add_arguments: str
    """`add_arguments(parser)`."""
    run: str
    """`run(arguments) -> exit code`."""
    example: str = ""


@dataclass(frozen=True)
class PlanOption:
    """A way to plan a workload from the command line alone, without a run file: an option that sets one of its keys."""

    key: str
    metavar: str
    help: str


@dataclass(frozen=True)
class Traits:
    """What a workload says of its model and samples, as far as it decides how a step runs."""

    equal_layers: bool = False
    """Many equal layers and samples of one shape: each layer is compiled by itself (`Workload.compile_layers`)."""
    few_shapes: bool = False
    """Batches have one shape, or can be brought to a few (`Samples.fixed_shape_batches`): a step can be recorded."""
    half_only: bool = False
    """It can so in half precision alone, for which there are kernels that take batches of these shapes."""
    own_loop: bool = False
    """The loss is computed outside of the step, by a script."""
    compiles: bool = True
    """torch's compiler can follow the Python of the model; `auto` leaves others as they are."""
    own_optimizer: bool = False
    """The update is the user's own code (`Workload.optimizer`), which may ask the host."""


@dataclass(frozen=True)
class StepWork:
    """What compiling could make shorter: the forward pass over a global batch, as the model is written."""

    operations: float
    """That would be compiled: of the whole model or, where layers are equal, of one of them."""
    moved_elements: float
    """Read and written between matrix products."""


@dataclass(frozen=True)
class WorkloadEntry:
    """All that the rest of Paceline knows of a workload. References are `module:name`, imported when first used."""

    run: str
    """The run class: model, data and loss, or passes."""
    model: str = ""
    """The sections of the run file; without them those of the run class."""
    data: str = ""
    subject: str = ""
    """What a plan prices, `subject(spec, samples, tokens)`; without it the model is tried out."""
    batched: bool = True
    """See `RunClass.batched`."""
    preload: tuple[str, ...] = ()
    """Modules that take long to import, and are imported once before the ranks part ways."""
    extends: bool = False
    """A fit by passes that goes on for longer when more are asked for; a training always does."""
    traits: Traits = Traits()
    draw: str = ""
    """Pictures that a run does not wait for: `draw(folder)` writes those that are not there when a report is made."""
    verbs: Mapping[str, Verb] = field(default_factory=dict)
    plan_options: Mapping[str, PlanOption] = field(default_factory=dict)
    """The first of them is enough for a plan."""

    def sections(self) -> dict[str, type[Section]]:
        """The types of the sections `model` and `data`."""
        if self.model and self.data:
            return {"model": import_object(self.model), "data": import_object(self.data)}
        from paceline.config.sections import DataSection, ModelSection, Section, merge_section_fields

        kind = self.run_class()
        for name, section in (("Model", kind.Model), ("Data", kind.Data)):
            if not (isinstance(section, type) and issubclass(section, Section)):
                raise UserError(
                    f"workload: {kind.__name__}.{name} is {section!r}; it must be a subclass of paceline.config.Section"
                )
        if not self.batched:
            return {"model": kind.Model, "data": kind.Data}
        found: dict[str, type[Section]] = {}
        for name, own, common in (("model", kind.Model, ModelSection), ("data", kind.Data, DataSection)):
            try:
                found[name] = merge_section_fields(own, common)
            except KeyError as taken:
                raise UserError(
                    f"workload: {kind.__name__}.{own.__name__} has a field {taken}, which every run file has in "
                    f"{name}; give yours another name"
                ) from None
        return found

    def work(self, spec: Any, samples: int | None = None) -> StepWork | None:
        """What a step does, as its planning subject knows it; None where only running it would tell."""
        return import_object(self.subject)(spec, samples, None).work if self.subject else None

    def run_class(self) -> type[RunClass]:
        """The class that trains or fits; the user's own code is executed here."""
        from paceline.config.sections import RunClass

        return load_user_class(self.run, RunClass)


def import_object(reference: str) -> Any:
    """The object behind `module:name`."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


RECORDED_ENTRY = WorkloadEntry(
    "", "paceline.config.sections:RecordedSection", "paceline.config.sections:RecordedSection"
)
"""Work of a finished run whose code is not to be executed: its values are there, and nothing can be asked of it."""


def find_entry(workload: Any) -> WorkloadEntry:
    """The entry of a name, or of `file.py:Class`; a UserError says which names there are."""
    if isinstance(workload, str):
        if is_script(workload):
            return import_object(SCRIPT)
        if ":" in workload:
            return _own(workload)
        if workload in BUILT_IN:
            return import_object(BUILT_IN[workload])
        if workload in find_installed():
            return _loaded(find_installed()[workload])
    wrong = f"is not known{did_you_mean(workload, list_workloads())}" if isinstance(workload, str) else "is not a name"
    raise UserError(
        f"workload: {workload!r} {wrong}; use one of {', '.join(list_workloads())}, file.py:Class or a script train.py"
    )


def is_script(workload: str) -> bool:
    """Whether it is a script that calls `paceline.run`: a file without a class."""
    return workload.endswith(".py")


def get_user_module(workload: str) -> str:
    """The file or module of a user's own workload; empty for a name."""
    return workload if is_script(workload) else workload.rpartition(":")[0]


def _own(reference: str) -> WorkloadEntry:
    """The entry of a run class that says all there is about itself."""
    kind = WorkloadEntry(reference).run_class()
    traits = Traits(equal_layers=getattr(kind, "compile_layers", False), few_shapes=True)  # until its samples are seen
    return WorkloadEntry(reference, batched=kind.batched, traits=traits)


def list_workloads() -> list[str]:
    """Every short name: those that come with Paceline first, then those of installed packages."""
    return [*BUILT_IN, *(name for name in sorted(find_installed()) if name not in BUILT_IN)]


def list_workload_verbs() -> dict[str, Verb]:
    """The commands that workloads add, by name. A package that cannot be imported adds none."""
    found: dict[str, Verb] = {}
    for name in list_workloads():
        with suppress(UserError):  # said when its name is used
            found = {**find_entry(name).verbs, **found}
    return found


def list_plan_options() -> dict[str, tuple[str, PlanOption]]:
    """The options of `plan` that stand for a run file: (workload, what it sets), by option."""
    found: dict[str, tuple[str, PlanOption]] = {}
    for name in list_workloads():
        with suppress(UserError):
            found = {**{option: (name, what) for option, what in find_entry(name).plan_options.items()}, **found}
    return found


@functools.cache
def find_installed() -> dict[str, metadata.EntryPoint]:
    """What installed packages add, by name."""
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _loaded(point: metadata.EntryPoint) -> WorkloadEntry:
    package = f"the installed package {point.dist.name!r}" if point.dist is not None else "an installed package"
    given = f"workload: {point.name!r} of {package}"
    try:
        found = point.load()
    except Exception as error:
        raise UserError(f"{given} fails when it is imported: {describe_error(error)}") from error
    try:
        return found if isinstance(found, WorkloadEntry) else _own(point.value)
    except UserError:
        said = (
            f"{given} is {point.value}, which is neither a Workload class nor a paceline.config.registry.WorkloadEntry"
        )
        raise UserError(said) from None


def load_user_class(reference: str, base: type) -> type[Any]:
    """The subclass of `base` behind `file.py:Class` or `package.module:Class`."""
    place, _, name = reference.rpartition(":")
    module = load_user_module(reference, "workload", "Class")
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    classes = {n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base)}
    have = [n for n, kind in classes.items() if kind.__module__ == module.__name__]
    raise UserError(
        f"workload: {place!r} has no Workload class {name!r}; "
        + (f"it has {', '.join(have)}" if have else "subclass paceline.Workload there")
    )


def load_user_function(reference: str, key: str) -> Any:
    """The function behind `file.py:function` or `package.module:function`; `key` is the field that names it."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UserError(f"{key}={reference}: write it as  {key}=path/to/file.py:function")
    module = load_user_module(reference, key, "function")
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    have = did_you_mean(name, own) or (f"; it has {', '.join(own)}" if own else "")
    raise UserError(f"{key}: {place!r} has no function {name!r}{have}")


def log_user_code(file: Path) -> None:
    """Log that a file of the user's is about to be executed; the command line prints it."""
    logging.getLogger(USER_CODE_LOGGER).info("executing %s", file.resolve())


def load_user_module(reference: str, key: str, what: str) -> Any:
    """The module before the colon of a reference; the user's own code is executed here."""
    place = reference.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"{key}: there is no file {place!r}; write it as  {key}: path/to/file.py:{what}")
    try:
        return _module_from_file(Path(place)) if place.endswith(".py") else import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.split(".")[0] == error.name.split(".")[0]:
            raise UserError(f"{key}: there is no module {place!r}; write it as  {key}: file.py:{what}") from None
        raise UserError(f"{key}: {place!r} needs {error.name!r}, which is not installed") from None
    except SyntaxError as error:
        file = error.filename or place
        raise UserError(f"{key}: {file!r} is not valid Python: {error.msg} (line {error.lineno})") from None
    except (Exception, SystemExit) as error:
        said = f"{key}: {place!r} fails when it is imported: {describe_error(error)}"
        raise UserError(f"{said}\n\n{format_user_trace(error, reference)}".rstrip()) from error


def build_reference(kind: type) -> str:
    """`file.py:Class` of a class, by which new processes find it."""
    from paceline.config.sections import RunClass

    if not issubclass(kind, RunClass):
        raise UserError(f"{kind.__name__} is not a Workload class; subclass paceline.Workload")
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ == "__main__" or file is None or "." in kind.__qualname__:
        raise UserError(
            f"{kind.__qualname__} is defined in the script or notebook that is running, or inside of a function; ranks "
            "are new processes and cannot see it: move it to a file of its own and import it from there"
        )
    return f"{Path(file).resolve()}:{kind.__name__}"


def format_user_trace(error: BaseException, reference: str) -> str:
    """The traceback of an error from where it entered the folder of the user's workload; empty if it never did."""
    place = get_user_module(reference)
    folder = Path(getattr(sys.modules.get(place), "__file__", None) or place).resolve().parent
    trace = error.__traceback__ if place else None
    while trace is not None and Path("/", trace.tb_frame.f_code.co_filename).resolve().parent != folder:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip() if trace else ""


def describe_error(error: BaseException) -> str:
    """`ValueError: what it says`, without what it says after that."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _module_from_file(file: Path) -> Any:
    """A file as a module; like a script, it may import what lies beside it."""
    name = f"paceline_own_{file.stem}_{zlib.crc32(bytes(file.resolve())):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if (folder := str(file.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        log_user_code(file)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
