"""A whole run file: one YAML document, validated, frozen, and able to say where each of its values came from.

Every quantity here is global (the batch, the learning rate, the length of the run); what one rank does with it is
derived in `layout.py`. Nothing else feeds a run: no hidden file, no environment variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    find_entry,
    is_script,
    list_workloads,
)
from paceline.config.run_file import (
    RENAMED_KEYS,
    parse_overrides,
    read_yaml_file,
    rename_old_keys,
    set_nested,
)
from paceline.config.sections import MOST, STRICT, ModelSection, Parallel, Section, Train, field
from paceline.errors import UserError, did_you_mean
from paceline.hardware.catalogue import parse_cluster

SectionKind = TypeVar("SectionKind", bound=Section)
DEFAULT = "default"
COMMAND_LINE = "command line"
SCRIPT_OBJECT = "the script's optimizer"
"""A value that an object of a script decides, as the learning rate of its optimiser."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]

OURS: dict[str, type[Section]] = {"parallel": Parallel}
"""Sections that are the same for all work and have paths."""
ELSEWHERE = {"batch_size": "global_batch", "learning_rate": "lr", "gpus": "ranks", "nproc_per_node": "ranks"}
"""Names that other tools have for ours, for the hint that follows an unknown key."""
SENTENCES = {
    "extra_forbidden": "unknown key{hint}",
    "invalid_key": "a key must be a word",
    "missing": "not given, and it has no default",
    "literal_error": "{given} is not allowed; use one of {expected}",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "{given} is not a whole number"),
    **dict.fromkeys(("float_parsing", "float_type", "finite_number"), "{given} is not a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "{given} is neither true nor false"),
    "path_type": "{given} is not a path",
    "string_type": "{given} is not a word",
    **dict.fromkeys(("tuple_type", "list_type"), "{given} is not a list; write it as  {key}=[{input}]"),
    **dict.fromkeys(
        ("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
        "{given} is out of range; it must be {limit}",
    ),
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"),
        "{given} is not a section; write it as  {key}: {{key: value}}",
    ),
    "string_pattern_mismatch": "{given} cannot name a folder; use letters, digits, '.', '_' and '-'",
    "not_a_bool": "{value!r} is not a number or a word",
    "huge": f"a number beyond {MOST:,}",
    **dict.fromkeys(("value_error", "assertion_error"), "{error}"),
}
"""What is wrong with a key, by the type of pydantic's problem."""
A_RECORD: Mapping[str, bool] = {"record": True}
"""The context in which a run that was is looked at."""
OR_ALSO = {
    **dict.fromkeys(("int_parsing", "int_from_float", "int_type"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    "dict_type": "{name: value}",
}
"""What a key takes beside words, by the type of the problem with it."""


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
    def _known_cluster(cls, text: str, info: ValidationInfo) -> str:
        if text != "local" and info.context is not A_RECORD:
            parse_cluster(text)
        return text

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _entry: WorkloadEntry | None = PrivateAttr(None)

    @property
    def entry(self) -> WorkloadEntry:
        """All that is known of the work; the user's own code may be executed to find out, unless this is a record."""
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
        return self.model.init_from if isinstance(self.model, ModelSection) else None

    def dump(self) -> dict[str, Any]:
        """Every value, as plain data that `build` reads back."""
        return self.model_dump(mode="json")

    def __reduce__(self) -> Any:
        """Travels to other processes as plain data: they may not have imported the user's own sections."""
        return build_spec, (self.dump(), dict(self._origins))

    def fields(self) -> Iterator[tuple[str, Any, str, str]]:
        """(dotted name, value, unit, meaning) of every field, in the order of the file."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                for sub, sub_info in type(value).model_fields.items():
                    yield f"{name}.{sub}", getattr(value, sub), _unit(sub_info), sub_info.description or ""
                yield from ((f"{name}.{sub}", found, "", "") for sub, found in (value.model_extra or {}).items())
            else:
                yield name, value, _unit(info), info.description or ""

    def replace(self, overrides: Mapping[str, Any], origin: str = "changed in Python") -> RunSpec:
        """The same spec with some dotted values changed, validated again."""
        values = self.dump()
        for key, value in overrides.items():
            set_nested(values, key, value)
        kept = {key: was for key, was in self._origins.items() if key.partition(".")[0] not in overrides}
        return build_spec(values, {**kept, **dict.fromkeys(overrides, origin)})


def _unit(info: Any) -> str:
    extra = info.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def load(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunSpec:
    """Read a run file and lay dotted overrides over it: `load("run.yaml", ["train.lr=3e-4"])`.

    Paths inside the file are relative to the file; paths in overrides are relative to the current folder.
    """
    file = Path(path)
    values, origins = read_yaml_file(file)
    is_record = file.name == "spec.yaml" and (file.parent / "events").is_dir()
    if is_record:
        values = rename_old_keys(values)
    pairs = parse_overrides(overrides)
    over: dict[str, Any] = {}
    for key, value in pairs.items():
        set_nested(over, key, value)
    commanded = {name: COMMAND_LINE for key in pairs for name in (key, ".".join(key.split(".")[:2]))}
    folders = ((values, file.resolve().parent, origins), (over, Path.cwd(), commanded))
    for given, folder, _ in folders:
        _anchor_names(given, folder)
    if is_record:
        asked = over.get("workload", values.get("workload", DEFAULT_WORKLOAD))
        if "workload" not in over or asked in list_workloads():  # code of one's own that is typed is trusted
            trust.check_trusted(file.parent, {**values, "workload": asked}, file.resolve().parent)
    sections = find_entry(over.get("workload", values.get("workload", DEFAULT_WORKLOAD))).sections()
    for given, folder, known in folders:
        _spell_out(given, sections, known)
        _anchor_paths(given, folder, {**sections, **OURS})
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
        else:  # in place of all that the file says there
            values[section] = value
            origins = {key: origin for key, origin in origins.items() if not key.startswith(f"{section}.")}
    return build_spec(values, origins | commanded)


SpecSource = RunSpec | str | Path | Mapping[str, Any] | type
"""What `spec_of` makes a spec of."""


def resolve_spec(source: SpecSource) -> RunSpec:
    """The run that somebody means in Python: a spec, the path of a run file, its content, or a Workload class."""
    match source:
        case RunSpec():
            return source
        case str() | Path():
            return load(source)
        case Mapping():
            values = {key: dict(value) if isinstance(value, Mapping) else value for key, value in source.items()}
            _anchor_names(values, Path.cwd())
            sections = find_entry(values.get("workload", DEFAULT_WORKLOAD)).sections()
            _spell_out(values, sections, {})
            _anchor_paths(values, Path.cwd(), {**sections, **OURS})
            return build_spec(values)
        case type():
            return build_spec({"workload": build_reference(source)})
    raise UserError(f"{source!r} is not a run; give the path of a run file, its content as a dict, or a Workload class")


def build_recorded_spec(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> RunSpec:
    """The spec of a run that is looked at: none of its code is executed, whoever wrote it."""
    ours = values.get("workload", DEFAULT_WORKLOAD) in BUILT_IN
    return build_spec(values, origins, None if ours else RECORDED_ENTRY, A_RECORD)


def build_spec(
    values: Mapping[str, Any],
    origins: Mapping[str, str] | None = None,
    entry: WorkloadEntry | None = None,
    context: Mapping[str, bool] | None = None,
) -> RunSpec:
    """Validate plain data into a RunSpec; every problem is named, with its place, in one UserError.

    `entry` is what is known of the work, where its name is not to be looked up. In the `context` of a record, the
    files that it names are not read: they may be those of another machine.
    """
    absent = {name for name in ("parallel", "model", "data", "train") if values.get(name) is None}
    values = {name: value for name, value in values.items() if name not in absent}
    origins = dict(origins or {})
    if values.get("parallel") == "auto":
        values["parallel"] = {"strategy": "auto"}
        if "parallel" in origins:
            origins["parallel.strategy"] = origins["parallel"]
    problems: list[str] = []
    sections = (entry or find_entry(values.get("workload", DEFAULT_WORKLOAD))).sections()
    _spell_out(values, sections, origins)
    everywhere: dict[str, type[BaseModel]] = {"": RunSpec, **sections, "train": Train, "parallel": Parallel}
    for name, kind in sections.items():
        try:
            values[name] = kind.model_validate(values.get(name, {}))
        except ValidationError as error:
            problems += [_sentence(problem, name, everywhere, origins) for problem in _once_each(error.errors())]
            values.pop(name, None)
    try:
        spec = RunSpec.model_validate(values, context=context)
    except ValidationError as error:
        problems += [_sentence(problem, "", everywhere, origins) for problem in _once_each(error.errors())]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    spec._origins.update(origins)
    spec._entry = entry
    return spec


def build_section(kind: type[SectionKind], values: Mapping[str, Any], origins: Mapping[str, str]) -> SectionKind:
    """A section that is a file of its own; every problem is named as in a run file."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [_sentence(problem, "", {"": kind}, origins) for problem in _once_each(error.errors())]
        raise UserError("\n".join(dict.fromkeys(problems))) from None


def _once_each(problems: Sequence[Any]) -> Iterator[Any]:
    """For a field that takes words or numbers pydantic complains once of each kind; here it is one problem."""
    chosen = {p["loc"][:-1]: p for p in problems if p["loc"] and str(p["loc"][-1]).startswith("literal[")}
    for problem in problems:
        place = problem["loc"][:-1]
        if place not in chosen:
            yield problem
        elif problem is not chosen[place]:
            words = chosen[place]["ctx"]["expected"]
            also = OR_ALSO.get(problem["type"])
            choice = {**chosen[place], "ctx": {"expected": f"{words} or {also}"}}
            yield {**(choice if also else problem), "loc": place}


def _sentence(problem: Any, prefix: str, everywhere: Mapping[str, type[BaseModel]], origins: Mapping[str, str]) -> str:
    """One pydantic problem as one sentence for a person: the value, where it was given, and what is allowed."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "contradiction":
        return str(problem["msg"])
    parts = [str(part) for part in problem["loc"] if not str(part).startswith("dict[")]
    of_a_key = kind in ("not_a_bool", "huge")
    place = [*filter(None, [prefix]), *parts, *([context["key"]] if of_a_key else [])]
    key = ".".join(place)
    places = [key] if of_a_key else [key, ".".join(place[:2]), *place[:1]]
    where = next((f" ({origins[k]})" for k in places if k in origins), "")
    given = "" if of_a_key else repr(problem["input"])
    facts = {
        **problem,
        **context,
        "key": key,
        "given": given if len(given) <= 80 else f"{given[:79]}…",
        "hint": _meant(place, everywhere) if kind == "extra_forbidden" else "",
        "expected": str(context.get("expected")).replace(" or ", ", "),
        "limit": problem["msg"].split("should be ")[-1],
    }
    return f"{key}: {SENTENCES.get(kind, '{given}: {msg}').format(**facts)}{where}"


def _meant(place: Sequence[str], everywhere: Mapping[str, type[BaseModel]]) -> str:
    """For an unknown key: the nearest one in its section or, where that is nearer, in another."""
    if now := RENAMED_KEYS.get(".".join(place)):
        return f"; it is now called {now}"
    section, word = place[0] if len(place) > 1 else "", place[-1]
    here = everywhere[section].model_fields
    if len(place) > 2:  # in a table of sections, such as train.groups
        inner = (kind for kind in get_args(here[place[1]].annotation) if hasattr(kind, "model_fields"))
        keys = [name for kind in inner for name in kind.model_fields]
        return did_you_mean(word, keys) or f"; known here: {', '.join(keys)}"
    names = {leaf: f"{name}.{leaf}".strip(".") for name, kind in everywhere.items() for leaf in kind.model_fields}
    names |= {leaf: f"{section}.{leaf}".strip(".") for leaf in here}
    hint = did_you_mean(ELSEWHERE.get(word, word), names, cutoff=0.6, shown=names)
    return hint or f"; known here: {', '.join(here) or 'nothing'}"


def _spell_out(values: dict[str, Any], sections: Mapping[str, type[Section]], origins: dict[str, str]) -> None:
    """A section that is given as one word, with the field that it stands for."""
    for name, kind in sections.items():
        if kind.word and isinstance(values.get(name), str):
            values[name] = {kind.word: values[name]}
            if name in origins:
                origins[f"{name}.{kind.word}"] = origins[name]


def _anchor_paths(values: dict[str, Any], folder: Path, sections: Mapping[str, type[Section]]) -> None:
    """Make the paths of a run file absolute, so that the spec means the same from anywhere."""
    for section, kind in sections.items():
        inside = values.get(section)
        for key in kind.paths():
            if isinstance(inside, dict) and (isinstance(given := inside.get(key), str) or _are_words(given)):
                found = [_absolute(word, folder, f"{section}.{key}") for word in _as_list(given)]
                inside[key] = found[0] if isinstance(given, str) else found
        for key in kind.references:
            if isinstance(inside, dict) and isinstance(inside.get(key), str):
                inside[key] = trust.resolve_reference(inside[key], folder)


def _absolute(path: str, folder: Path, key: str) -> str:
    try:
        return str((folder / Path(path).expanduser()).resolve())
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{key}: {path!r} is not a path: {error}") from None


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value


def _anchor_names(values: dict[str, Any], folder: Path) -> None:
    """The same for a cluster file and a workload of the user's own, which may be names instead."""
    cluster = values.get("cluster")
    if isinstance(cluster, str) and cluster.endswith((".yaml", ".yml")):
        values["cluster"] = _absolute(cluster, folder, "cluster")
    workload = values.get("workload")
    if isinstance(workload, str) and is_script(workload):
        values["workload"] = _absolute(workload, folder, "workload")
    elif isinstance(workload, str) and ":" in workload:
        values["workload"] = trust.resolve_reference(workload, folder)
