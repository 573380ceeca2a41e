"""The run file as a validated, frozen value that knows where each of its values came from."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, Field, PrivateAttr, SerializeAsAny, ValidationError, ValidationInfo, field_validator

from paceline.config import trust
from paceline.config.registry import (
    BUILT_IN,
    DEFAULT_WORKLOAD,
    RECORDED_ENTRY,
    WorkloadEntry,
    build_reference,
    describe_error,
    find_entry,
    find_registered,
    is_script,
    list_workloads,
    register_class,
)
from paceline.config.run_file import parse_overrides, read_yaml_file, set_nested
from paceline.config.sections import STRICT, ModelSection, Parallel, Section, Train, field
from paceline.errors import Code, UserError, did_you_mean
from paceline.hardware.catalogue import parse_cluster
from paceline.io.remote import fetch_data, find_address
from paceline.io.safe_yaml import read_data_file

SectionKind = TypeVar("SectionKind", bound=Section)
DEFAULT = "default"
COMMAND_LINE, ARGUMENT = "command line", "argument overrides"
SCRIPT_OBJECT = "the script's optimizer"
"""A value that an object of a script decides, as the learning rate of its optimiser."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]

FIXED_SECTIONS: dict[str, type[BaseModel]] = {"train": Train, "parallel": Parallel}
"""The sections that are the same for all workloads."""
FOREIGN_NAMES = {"batch_size": "global_batch", "learning_rate": "lr", "gpus": "ranks", "nproc_per_node": "ranks"}
FOREIGN_NAMES |= {"start": "init_from", "checkpoint": "checkpoint_format"}
"""Names of our keys in other tools and in earlier versions, for the hint that follows an unknown key."""
CODES: dict[str, Code] = {"extra_forbidden": "unknown-key", "missing": "missing-value", "contradiction": "conflict"}
SECTIONS = ("train", "parallel", "model", "data")
LENGTHS = {"train.epochs": "train.steps", "train.steps": "train.epochs"}
RECORD: Mapping[str, bool] = {"record": True}
"""The validation context of a recorded run, whose files may be those of another machine."""


class RunSpec(BaseModel):
    """A whole run file. `origin("train.lr")` says where a value came from."""

    model_config = STRICT

    name: Name = field("run", "", "name of the run folder")
    workload: str = field(
        DEFAULT_WORKLOAD, "", f"{', '.join(BUILT_IN)}, or your own as file.py:Class, or a script as train.py"
    )
    model: SerializeAsAny[Section] = Field(default_factory=Section)
    data: SerializeAsAny[Section] = Field(default_factory=Section)
    train: Train = Field(default_factory=Train)
    parallel: Parallel = Field(default_factory=Parallel)
    cluster: str = field("local", "", "machines the run may use: local, a short form as 2x8xH100, or a cluster file")

    @field_validator("cluster")
    @classmethod
    def _check_cluster(cls, text: str, info: ValidationInfo) -> str:
        if text != "local" and info.context is not RECORD:
            parse_cluster(text)
        return text

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _entry: WorkloadEntry | None = PrivateAttr(None)

    @property
    def entry(self) -> WorkloadEntry:
        """The table entry of the workload; finding it may execute the user's own code, unless this is a record."""
        return self._entry or find_entry(self.workload)

    @property
    def origins(self) -> dict[str, str]:
        """Where values came from, by key; defaults are left out."""
        return {key: origin for key, origin in self._origins.items() if origin != DEFAULT}

    def origin(self, key: str) -> str:
        return self._origins.get(key, DEFAULT)

    @property
    def init_from(self) -> Path | None:
        """The weights to start with, `model.init_from`; None for work that has none."""
        path = self.model.init_from if isinstance(self.model, ModelSection) else None
        return None if path is None else fetch_data(path, "model.init_from")

    def dump(self) -> dict[str, Any]:
        """Return every value, as plain data that `build_spec` reads back."""
        return self.model_dump(mode="json")

    def __reduce__(self) -> Any:
        """Pickle as plain data: another process may not have imported the user's own sections.

        A class without a file travels by value, from this process to its own ranks.
        """
        kind = find_registered(self.workload)
        return _restore_spec, (self.dump(), dict(self._origins), None if kind is None else _dump_class(kind))

    def fields(self) -> Iterator[tuple[str, Any, str, str]]:
        """Yield (key, value, unit, meaning) of every field, in the order of the file."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                for sub, sub_info in type(value).model_fields.items():
                    yield f"{name}.{sub}", getattr(value, sub), _read_unit(sub_info), sub_info.description or ""
                yield from ((f"{name}.{sub}", found, "", "") for sub, found in (value.model_extra or {}).items())
            else:
                yield name, value, _read_unit(info), info.description or ""

    def replace(self, overrides: Mapping[str, Any], origin: str | Mapping[str, str] = "changed in Python") -> RunSpec:
        """Return the spec with some dotted values changed, validated again; `origin` is one of all, or by key."""
        values = self.dump()
        for key, value in overrides.items():
            set_nested(values, key, value)
        kept = {key: was for key, was in self._origins.items() if key.partition(".")[0] not in overrides}
        changed = dict.fromkeys(overrides, origin) if isinstance(origin, str) else origin
        return build_spec(values, {**kept, **changed})


def _dump_class(kind: type) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(kind))
    except Exception as error:
        message = f"{kind.__name__} cannot be sent to the ranks ({describe_error(error)}); move it to a file of its own"
        raise UserError(message, code="invalid-workload", key="workload") from None


def _restore_spec(values: dict[str, Any], origins: dict[str, str], kind: bytes | None) -> RunSpec:
    if kind is not None:
        register_class(pickle.loads(kind))  # of a pickle that is being loaded: from our own process
    return build_spec(values, origins)


def _read_unit(info: Any) -> str:
    extra = info.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def load(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = (), origin: str = "") -> RunSpec:
    """Read a run file and lay dotted overrides over it: `load("run.yaml", ["train.lr=3e-4"])`.

    Paths inside the file are relative to the file; paths in overrides are relative to the current folder.
    """
    file = Path(path)
    values, origins = read_yaml_file(file)
    is_record = file.name == "spec.yaml" and (file.parent / "events").is_dir()
    pairs = parse_overrides(overrides)
    over: dict[str, Any] = {}
    for key, value in pairs.items():
        set_nested(over, key, value)
    origin = origin or find_origin(overrides)
    commanded = {name: origin for key in pairs for name in (key, ".".join(key.split(".")[:2]))}
    folders = ((values, file.resolve().parent, origins), (over, Path.cwd(), commanded))
    for given, folder, _ in folders:
        _anchor_names(given, folder)
    workload = over.get("workload", values.get("workload", DEFAULT_WORKLOAD))
    if is_record and ("workload" not in over or workload in list_workloads()):  # the user trusts code that they type
        trust.check_trusted(file.parent, {**values, "workload": workload}, file.resolve().parent)
    sections = find_entry(workload).sections()
    for given, folder, known in folders:
        _expand_shorthand(given, sections, known)
        _anchor_paths(given, folder, sections)
    if {"train.epochs", "train.steps"} & pairs.keys() and isinstance(values.get("train"), dict):
        for length in ("epochs", "steps"):  # the new length replaces the file's, whichever way either is given
            values["train"].pop(length, None)
            origins.pop(f"train.{length}", None)
    for section, value in over.items():
        below = values.get(section)
        if isinstance(value, dict) and isinstance(below, dict):
            deep = {key.split(".")[1] for key in pairs if key.startswith(f"{section}.") and key.count(".") > 1}
            both = {name: below[name] | value[name] for name in deep if isinstance(below.get(name), dict)}
            values[section] = {**below, **value, **both}
        else:  # replaces the whole section of the file
            values[section] = value
            origins = {key: origin for key, origin in origins.items() if not key.startswith(f"{section}.")}
    return build_spec(values, origins | commanded)


def find_origin(overrides: Sequence[str] | Mapping[str, Any]) -> str:
    return ARGUMENT if isinstance(overrides, Mapping) else COMMAND_LINE


SpecSource = RunSpec | str | Path | Mapping[str, Any] | type  # what `resolve_spec` takes


def resolve_spec(source: SpecSource) -> RunSpec:
    """Return the spec of a run file's path, its content as a dict, a Workload class, or a spec itself."""
    match source:
        case RunSpec():
            return source
        case str() | Path():
            return load(source)
        case Mapping():
            values = dict(source)
            if isinstance(kind := values.get("workload"), type):
                values["workload"] = build_reference(kind)
            return build_spec(anchor_values(values, Path.cwd()))
        case type():
            return build_spec({"workload": build_reference(source)})
    raise UserError(f"{source!r} is not a run; give the path of a run file, its content as a dict, or a Workload class")


def anchor_values(
    source: Mapping[str, Any], folder: Path, sections: Mapping[str, type[Section]] | None = None
) -> dict[str, Any]:
    """Return values given in Python as those of a run file, with paths from this folder made absolute."""
    values: dict[str, Any] = _spell_paths(source)
    _anchor_names(values, folder)
    sections = sections or find_entry(values.get("workload", DEFAULT_WORKLOAD)).sections()
    _expand_shorthand(values, sections, {})
    _anchor_paths(values, folder, sections)
    return values


def apply_settings(spec: RunSpec, settings: Mapping[str, Any]) -> RunSpec:
    """Return the spec with keyword arguments, as in `train(Net, lr=1e-3)`: a field, or a section with its dict."""
    if not settings:
        return spec
    placed: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value in settings.items():
        found = _place_setting(spec, name, value)
        placed |= found
        origins |= dict.fromkeys(found, f"argument {name}")
    nested: dict[str, Any] = {}
    for key, value in placed.items():
        section, _, inner = key.partition(".")
        if inner:
            nested.setdefault(section, {})[inner] = value
        else:
            nested[section] = value
    anchored = anchor_values(nested, Path.cwd(), spec.entry.sections())
    for key in placed:
        section, _, inner = key.partition(".")
        placed[key] = anchored[section][inner] if inner else anchored[section]
    for key in LENGTHS.keys() & placed.keys():  # a length replaces the other, whichever way either is given
        placed.setdefault(LENGTHS[key], None)
    source = spec.data.infer_source(placed.get("data.path"))
    if source is not None and spec.origin("data.source") == DEFAULT:
        placed.setdefault("data.source", source)
    return spec.replace(placed, {**origins})


def _place_setting(spec: RunSpec, name: str, value: Any) -> dict[str, Any]:
    if name in SECTIONS and isinstance(value, Mapping):
        return {f"{name}.{key}": inner for key, inner in value.items()}
    if "." in name or name in RunSpec.model_fields:
        return {name: value}
    kinds = {section: type(getattr(spec, section)).model_fields for section in SECTIONS}
    places = [section for section, fields in kinds.items() if name in fields]
    if not places:
        known = sorted({field for fields in kinds.values() for field in fields})
        message = f"train() has no argument {name!r}; "
        hint = did_you_mean(name, known).removeprefix(", ") or "those of a run file are listed by  paceline keys"
        raise UserError(f"{message}{hint}", code="unknown-key", key=name)
    if len(places) > 1:
        lines = "  or  ".join(f"{place}={{{name!r}: {value!r}}}" for place in places)
        raise UserError(f"train(): {name} is in several sections; type  {lines}", code="invalid-value", key=name)
    return {f"{places[0]}.{name}": value}


def _spell_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spell_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_paths(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def localise_spec(spec: RunSpec) -> RunSpec:
    """Return the spec with the copies in the cache in place of addresses of data and models."""
    changed: dict[str, Any] = {}
    for section in ("model", "data"):
        part = getattr(spec, section)
        for key in part.paths():
            value = getattr(part, key, None)
            if isinstance(value, str | Path) and find_address(value) is not None:
                changed[f"{section}.{key}"] = str(fetch_data(Path(value), f"{section}.{key}"))
    return spec.replace(changed) if changed else spec


def build_recorded_spec(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> RunSpec:
    """Build the spec of a recorded run without executing its code, whoever wrote it."""
    ours = values.get("workload", DEFAULT_WORKLOAD) in BUILT_IN
    return build_spec(values, origins, None if ours else RECORDED_ENTRY, RECORD)


def build_spec(
    values: Mapping[str, Any],
    origins: Mapping[str, str] | None = None,
    entry: WorkloadEntry | None = None,
    context: Mapping[str, bool] | None = None,
) -> RunSpec:
    """Validate plain data into a RunSpec; one UserError names every problem, with its place."""
    values = {name: value for name, value in values.items() if value is not None or name not in SECTIONS}
    origins = dict(origins or {})
    if values.get("parallel") == "auto":
        values["parallel"] = {"strategy": "auto"}
        if "parallel" in origins:
            origins["parallel.strategy"] = origins["parallel"]
    sections = (entry or find_entry(values.get("workload", DEFAULT_WORKLOAD))).sections()
    _expand_shorthand(values, sections, origins)
    errors: list[tuple[str, ValidationError]] = []
    for name, kind in sections.items():
        try:
            values[name] = kind.model_validate(values.get(name, {}))
        except ValidationError as error:
            errors.append((name, error))
            values.pop(name, None)
    try:
        spec = RunSpec.model_validate(values, context=context)
    except ValidationError as error:
        errors.append(("", error))
    if errors:
        raise _Explainer({"": RunSpec, **sections, **FIXED_SECTIONS}, origins).explain(errors)
    spec._origins.update(origins)
    spec._entry = entry
    return spec


def build_section(kind: type[SectionKind], values: Mapping[str, Any], origins: Mapping[str, str]) -> SectionKind:
    """Validate a section that has its own file; problems are named as in a run file."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _Explainer({"": kind}, origins).explain([("", error)]) from None


@cache
def _load_messages() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = read_data_file(Path(__file__).with_name("messages.yaml"))
    return found


@dataclass(frozen=True)
class _Explainer:
    """Translates pydantic's errors for a person: the value, where it was given, and what is allowed."""

    sections: Mapping[str, type[BaseModel]]
    origins: Mapping[str, str]

    def explain(self, errors: Sequence[tuple[str, ValidationError]]) -> UserError:
        """Return one error that names every problem of these sections."""
        found: dict[str, tuple[Code, str]] = {}
        for section, error in errors:
            for problem in _merge_choices(error.errors()):
                message, key = self._describe(problem, section)
                found.setdefault(message, (CODES.get(problem["type"], "invalid-value"), key))
        code, key = next(iter(found.values()))
        return UserError("\n".join(found), code=code, key=key)

    def _describe(self, problem: Any, section: str) -> tuple[str, str]:
        kind, context = problem["type"], problem.get("ctx", {})
        parts = [str(part) for part in problem["loc"] if not str(part).startswith("dict[")]
        of_a_key = kind in ("not_a_bool", "huge")
        place = [*filter(None, [section]), *parts, *([context["key"]] if of_a_key else [])]
        key = ".".join(place)
        if kind == "contradiction":  # which names its keys
            return str(problem["msg"]), key
        places = [key] if of_a_key else [key, ".".join(place[:2]), *place[:1]]
        where = next((f" ({self.origins[k]})" for k in places if k in self.origins), "")
        given = "" if of_a_key else repr(problem["input"])
        facts = {
            **problem,
            **context,
            "key": key,
            "given": given if len(given) <= 80 else f"{given[:79]}…",
            "hint": self._suggest(place) if kind == "extra_forbidden" else "",
            "expected": str(context.get("expected")).replace(" or ", ", "),
            "limit": problem["msg"].split("should be ")[-1],
        }
        message = _load_messages()["messages"].get(kind, "{given}: {msg}")
        return f"{key}: {message.format(**facts)}{where}", key

    def _suggest(self, place: Sequence[str]) -> str:
        """Suggest, for an unknown key, the nearest one in its section or, if that is nearer, in another."""
        section, word = place[0] if len(place) > 1 else "", place[-1]
        here = self.sections[section].model_fields
        if len(place) > 2:  # in a table of sections, such as train.groups
            inner = (kind for kind in get_args(here[place[1]].annotation) if hasattr(kind, "model_fields"))
            keys = [name for kind in inner for name in kind.model_fields]
            return did_you_mean(word, keys) or f"; known here: {', '.join(keys)}"
        names = {leaf: f"{name}.{leaf}".strip(".") for name, s in self.sections.items() for leaf in s.model_fields}
        names |= {leaf: f"{section}.{leaf}".strip(".") for leaf in here}
        hint = did_you_mean(FOREIGN_NAMES.get(word, word), names, cutoff=0.6, shown=names)
        return hint or f"; known here: {', '.join(here) or 'nothing'}"


def _merge_choices(problems: Sequence[Any]) -> Iterator[Any]:
    """Yield one problem per field: for a field that takes words or numbers pydantic reports one for each kind."""
    chosen = {p["loc"][:-1]: p for p in problems if p["loc"] and str(p["loc"][-1]).startswith("literal[")}
    for problem in problems:
        place = problem["loc"][:-1]
        if place not in chosen:
            yield problem
        elif problem is not chosen[place]:
            words = chosen[place]["ctx"]["expected"]
            also = _load_messages()["alternatives"].get(problem["type"])
            choice = {**chosen[place], "ctx": {"expected": f"{words} or {also}"}}
            yield {**(choice if also else problem), "loc": place}


def _expand_shorthand(values: dict[str, Any], sections: Mapping[str, type[Section]], origins: dict[str, str]) -> None:
    """Expand `section: word` to `section: {field: word}` in place, and copy its origin to the field."""
    for name, kind in sections.items():
        if kind.word and isinstance(values.get(name), str):
            values[name] = {kind.word: values[name]}
            if name in origins:
                origins[f"{name}.{kind.word}"] = origins[name]


def _anchor_paths(values: dict[str, Any], folder: Path, sections: Mapping[str, type[Section]]) -> None:
    """Replace the relative paths in `values` by absolute ones, so that the spec means the same from anywhere."""
    kinds: dict[str, type[Section]] = {**sections, "parallel": Parallel}
    for section, kind in kinds.items():
        inside = values.get(section)
        if not isinstance(inside, dict):
            continue
        for key in kind.paths():
            given, name = inside.get(key), f"{section}.{key}"
            if isinstance(given, str):
                inside[key] = _make_absolute(given, folder, name)
            elif isinstance(given, list) and all(isinstance(path, str) for path in given):
                inside[key] = [_make_absolute(path, folder, name) for path in given]
        for key in kind.references:
            if isinstance(inside.get(key), str):
                inside[key] = trust.resolve_reference(inside[key], folder)


def _make_absolute(path: str, folder: Path, key: str) -> str:
    if (address := find_address(path)) is not None:
        return address
    try:
        return str((folder / Path(path).expanduser()).resolve())
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{key}: {path!r} is not a path: {error}", code="invalid-value", key=key) from None


def _anchor_names(values: dict[str, Any], folder: Path) -> None:
    """Replace a cluster file and a workload file in `values` by absolute paths; names of either stay as they are."""
    cluster, workload = values.get("cluster"), values.get("workload")
    if isinstance(cluster, str) and cluster.endswith((".yaml", ".yml")):
        values["cluster"] = _make_absolute(cluster, folder, "cluster")
    if isinstance(workload, str) and is_script(workload):
        values["workload"] = _make_absolute(workload, folder, "workload")
    elif isinstance(workload, str) and ":" in workload:
        values["workload"] = trust.resolve_reference(workload, folder)
