"""The table of workloads: what a name in a run file means. Imports no torch."""

import functools
import importlib.util
import logging
import sys
import traceback
import zlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError, did_you_mean
from paceline.io.limits import check_limits

if TYPE_CHECKING:
    from paceline.config.sections import RunClass, Section

GROUP = "paceline.workloads"  # of entry points: each names a `WorkloadEntry` or a Workload class
NAMES = ("classifier", "ensemble", "keras", "lm", "tabular", "topics", "transformers", "trees", "unet")
BUILT_IN = {name: f"paceline.workloads.{name}:ENTRY" for name in NAMES}
DEFAULT_WORKLOAD = "classifier"
SCRIPT = "paceline.script:ENTRY"
USER_CODE_LOGGER = "paceline.user_code"


@dataclass(frozen=True)
class Verb:
    """A command. The references `module:name` are imported when its name is typed."""

    help: str
    add_arguments: str  # `add_arguments(parser)`
    run: str  # `run(arguments) -> exit code`
    example: str = ""
    group: str = "train"
    """Heading of `paceline --help` that it is listed under."""


SAMPLE = Verb(
    "generate text with a trained language model",
    "paceline.inference.sample:add_sample_arguments",
    "paceline.inference.sample:run_sample",
    'paceline sample runs/lm_tiny "Returns the"',
    "use",
)


@dataclass(frozen=True)
class Traits:
    """What decides how a step of a workload runs."""

    equal_layers: bool = False
    """Many equal layers, which are compiled one by one; of a user's model it is known once the model is built."""
    few_shapes: bool = False
    """Batches have few shapes, or can be padded to few (`Samples.fixed_shape_batches`): a step can be recorded."""
    half_only: bool = False
    """A step can be recorded in half precision only, which has kernels for batches of these shapes."""
    chunks_loss: bool = False  # the loss over a vocabulary can be computed in chunks
    own_loop: bool = False  # a script computes the loss, outside of the step
    compiles: bool = True  # torch's compiler can trace the model
    own_optimizer: bool = False
    """The update is the user's own code (`Workload.optimizer`), which may synchronise with the host."""


@dataclass(frozen=True)
class StepWork:
    """What compiling could speed up: the forward pass over a global batch, as the model is written."""

    operations: float  # that would be compiled: of the whole model or, if layers are equal, of one of them
    moved_elements: float  # read and written between matrix products


@dataclass(frozen=True)
class WorkloadEntry:
    """All that the rest of Paceline knows of a workload. References are `module:name`, imported when first used."""

    run: str  # the run class: model, data and loss, or passes
    model: str = ""  # the sections of the run file; by default those of the run class
    data: str = ""
    subject: str = ""  # the cost model, `subject(spec, samples, tokens)`; by default the model is traced
    batched: bool = True  # see `RunClass.batched`
    preload: tuple[str, ...] = ()
    """Modules that are slow to import, and are imported once before ranks are forked."""
    extends: bool = False  # a fit by passes can be extended after it finished; a training always can
    traits: Traits = Traits()
    draw: str = ""
    """`draw(folder)` draws missing pictures when a report is written, so that the run does not wait for them."""
    tables: str = ""
    """`tables(folder)` builds tables of its results for a report."""
    verbs: Mapping[str, Verb] = field(default_factory=dict)
    use: str = "predict {run} FILE.csv"
    """The verb and arguments to type with a finished run; "" if none takes it."""
    new_inputs: str = ""
    """The Python that applies a finished run to new inputs, if `predict` does not."""
    plan_defaults: str = ""
    """`plan_defaults(config)` returns the settings with which `plan --hf CONFIG.json` plans it."""

    def sections(self) -> "dict[str, type[Section]]":
        """Return the types of the sections `model` and `data`."""
        if self.model and self.data:
            return {"model": import_object(self.model), "data": import_object(self.data)}
        from paceline.config.sections import DataSection, ModelSection, Section, merge_section_fields

        kind = self.run_class()
        found: dict[str, type[Section]] = {}
        for name, own, common in (("model", kind.Model, ModelSection), ("data", kind.Data, DataSection)):
            if not (isinstance(own, type) and issubclass(own, Section)):
                raise _workload_error(f"{kind.__name__}.{name.title()} is {own!r}, not a subclass of Section")
            try:
                found[name] = merge_section_fields(own, common) if self.batched else own
            except KeyError as taken:
                raise _workload_error(
                    f"{kind.__name__}.{own.__name__} has a field {taken}, which every run file has in {name}; rename it"
                ) from None
        return found

    def work(self, spec: Any, samples: int | None = None) -> StepWork | None:
        """Return what a step does, as the cost model knows it, if there is one."""
        return import_object(self.subject)(spec, samples, None).work if self.subject else None

    def run_class(self) -> "type[RunClass]":
        """Return the class that trains or fits; this executes the user's own code."""
        from paceline.config.sections import RunClass

        return load_user_class(self.run, RunClass)


def _workload_error(message: str) -> UserError:
    return UserError(f"workload: {message}", code="invalid-workload", key="workload")


def import_object(reference: str) -> Any:
    """Import the object behind `module:name`."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


RECORDED_ENTRY = WorkloadEntry(
    "", "paceline.config.sections:RecordedSection", "paceline.config.sections:RecordedSection"
)
"""For a recorded run whose code must not be executed: its values can be read, and nothing else."""


def find_entry(workload: Any) -> WorkloadEntry:
    """Return the entry of a name, a script, or `file.py:Class`."""
    if isinstance(workload, str):
        if is_script(workload) or workload in BUILT_IN:
            entry: WorkloadEntry = import_object(BUILT_IN.get(workload, SCRIPT))
            return entry
        if ":" in workload:
            return _build_user_entry(workload)
        if workload in find_installed():
            return _load_installed(find_installed()[workload])
    known = list_workloads()
    wrong = f"is not known{did_you_mean(workload, known)}" if isinstance(workload, str) else "is not a name"
    use = f"use one of {', '.join(known)}, file.py:Class or a script train.py"
    raise UserError(f"workload: {workload!r} {wrong}; {use}", code="unknown-name", key="workload")


def is_script(workload: str) -> bool:
    """Return whether it is a script that calls `paceline.run`: a file without a class."""
    return workload.endswith(".py")


def get_user_module(workload: str) -> str:
    """Return the file or module of a user's own workload; "" for a name."""
    return workload if is_script(workload) else workload.rpartition(":")[0]


def _build_user_entry(reference: str) -> WorkloadEntry:
    kind = WorkloadEntry(reference).run_class()
    traits = Traits(equal_layers=getattr(kind, "compile_layers", False), few_shapes=True)  # until its samples are seen
    return WorkloadEntry(reference, batched=kind.batched, traits=traits)


def list_workloads() -> list[str]:
    """Return every short name: those of Paceline, then those of installed packages."""
    return [*BUILT_IN, *(name for name in sorted(find_installed()) if name not in BUILT_IN)]


def _list_entries() -> Iterator[tuple[str, WorkloadEntry]]:
    """Yield the name and the entry of each workload, without those of packages that cannot be imported."""
    for name in list_workloads():
        with suppress(UserError):  # reported when its name is used
            yield name, find_entry(name)


def list_workload_verbs() -> dict[str, Verb]:
    """Return the commands that workloads add, by name; of several with one name, the first."""
    return dict(ChainMap(*(dict(entry.verbs) for _, entry in _list_entries())))


@functools.cache
def find_installed() -> dict[str, metadata.EntryPoint]:
    """Return the workloads of installed packages, by name."""
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _load_installed(point: metadata.EntryPoint) -> WorkloadEntry:
    package = f"the installed package {point.dist.name!r}" if point.dist is not None else "an installed package"
    given = f"{point.name!r} of {package}"
    try:
        found = point.load()
    except Exception as error:
        raise _workload_error(f"{given} fails when it is imported: {describe_error(error)}") from error
    try:
        return found if isinstance(found, WorkloadEntry) else _build_user_entry(point.value)
    except UserError:
        message = f"{given} is {point.value}, which is neither a Workload class nor a WorkloadEntry"
        raise _workload_error(message) from None


def load_user_class(reference: str, base: type) -> type[Any]:
    """Load the subclass of `base` behind `file.py:Class` or `package.module:Class`."""
    place, _, name = reference.rpartition(":")
    if place == MAIN and (known := _classes.get(reference) or vars(sys.modules[MAIN]).get(name)) is None:
        message = f"workload: {name} was defined in a notebook or a running script; define it again there, and call"
        raise UserError(f"{message}  paceline.train({name}, resume=RUN)", code="not-found", key="workload")
    if place == MAIN and isinstance(known, type) and issubclass(known, base):
        return known
    module = load_user_module(reference, "workload", "Class")
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    classes = {n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base)}
    have = [n for n, kind in classes.items() if kind.__module__ == module.__name__]
    hint = f"it has {', '.join(have)}" if have else "subclass paceline.Workload there"
    raise UserError(f"workload: {place!r} has no Workload class {name!r}; {hint}", code="unknown-name", key="workload")


def load_user_function(reference: str, key: str) -> Any:
    """Load the function behind `file.py:function` or `package.module:function`, which the field `key` names."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        message = f"{key}={reference}: write it as  {key}=path/to/file.py:function"
        raise UserError(message, code="invalid-value", key=key)
    module = load_user_module(reference, key, "function")
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    have = did_you_mean(name, own) or (f"; it has {', '.join(own)}" if own else "")
    raise UserError(f"{key}: {place!r} has no function {name!r}{have}", code="unknown-name", key=key)


def log_user_code(file: Path) -> None:
    """Log that a file of the user's is about to be executed; the command line prints it."""
    logging.getLogger(USER_CODE_LOGGER).info("executing %s", file.resolve())


def load_user_module(reference: str, key: str, what: str) -> Any:
    """Import the module before the colon of a reference; this executes the user's own code."""
    place = reference.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        message = f"{key}: there is no file {place!r}; write it as  {key}: path/to/file.py:{what}"
        raise UserError(message, code="not-found", key=key)
    try:
        check_limits()  # it imports torch
        return _execute_file(Path(place)) if place.endswith(".py") else import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.split(".")[0] == error.name.split(".")[0]:
            message = f"{key}: there is no module {place!r}; write it as  {key}: file.py:{what}"
            raise UserError(message, code="not-found", key=key) from None
        message = f"{key}: {place!r} needs {error.name!r}, which is not installed"
        raise UserError(message, code="not-installed", key=key) from None
    except SyntaxError as error:
        message = f"{key}: {error.filename or place!r} is not valid Python: {error.msg} (line {error.lineno})"
        raise UserError(message, code="invalid-format", key=key) from None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{key}: {place!r} fails when it is imported: {describe_error(error)}"
        trace = format_user_trace(error, reference)
        raise UserError(f"{message}\n\n{trace}".rstrip(), code="user-code-failed", key=key) from error


MAIN = "__main__"
_classes: dict[str, type] = {}
"""Classes of a notebook, the running script or a function, by reference: new processes get them by value."""


def register_class(kind: type) -> str:
    """Return the reference `__main__:Class` by which this process finds a class that no file can be imported for."""
    reference = f"{MAIN}:{kind.__name__}"
    _classes[reference] = kind
    return reference


def find_registered(reference: str) -> type | None:
    return _classes.get(reference)


def build_reference(kind: type) -> str:
    """Return `file.py:Class` of a class, by which new processes find it."""
    from paceline.config.sections import RunClass

    if not issubclass(kind, RunClass):
        raise _workload_error(f"{kind.__name__} is not a Workload class; subclass paceline.Workload")
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ == MAIN or file is None or "." in kind.__qualname__:
        return register_class(kind)
    return f"{Path(file).resolve()}:{kind.__name__}"


def format_user_trace(error: BaseException, reference: str) -> str:
    """Format the traceback of an error from where it entered the folder of the user's workload; "" if it never did."""
    place = get_user_module(reference)
    folder = Path(getattr(sys.modules.get(place), "__file__", None) or place).resolve().parent
    trace = error.__traceback__ if place else None
    while trace is not None and Path("/", trace.tb_frame.f_code.co_filename).resolve().parent != folder:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip() if trace else ""


@contextmanager
def guard_user_code(key: str, reference: str) -> Iterator[None]:
    """Translate errors of the user's function `reference`, which the field `key` names."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        trace = format_user_trace(error, reference)
        message = f"{key}: {reference} fails: {describe_error(error)}\n\n{trace}".rstrip()
        raise UserError(message, code="user-code-failed", key=key) from error


def describe_error(error: BaseException) -> str:
    """Return `ValueError: message`, with the first line of the message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _execute_file(file: Path) -> Any:
    """Execute a file as a module; like a script, it may import what lies beside it."""
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
