"""The commands `keys`, `schema` and `completion`, and the keys of a run file."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from paceline.config import registry
from paceline.config.registry import BUILT_IN, DEFAULT_WORKLOAD, find_entry, list_workloads
from paceline.config.run_spec import FIXED_SECTIONS, FOREIGN_NAMES, SECTIONS, RunSpec
from paceline.config.sections import Section
from paceline.errors import UserError, did_you_mean
from paceline.io.files import print_json
from paceline.io.terminal import build_console, print_text

SIGNS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
DRAFT = "http://json-schema.org/draft-07/schema#"
MODE: JsonSchemaMode = "validation"
OWN_WORKLOAD = {"type": "string", "pattern": r"(\.py|:\w+)$"}
"""FILE.py:Class, module:Class, or a script."""


@dataclass(frozen=True)
class Key:
    name: str
    """Dotted, as it is typed."""
    default: str
    unit: str
    words: tuple[str, ...]
    """The choices, if it is one."""
    limits: str
    meaning: str

    @property
    def allowed(self) -> str:
        return ", ".join((*self.words, *filter(None, [self.limits])))


def list_sections(workload: str = registry.DEFAULT_WORKLOAD) -> dict[str, type[BaseModel]]:
    """Return the sections of a run file by name; "run" has the keys outside of sections."""
    return {"run": RunSpec, **registry.find_entry(workload).sections(), **FIXED_SECTIONS}


def iter_keys(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a section, in the order of the run file."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            continue
        extra = info.json_schema_extra
        default = "" if info.default in (None, (), "") else str(info.default)
        yield Key(
            name=f"{prefix}.{name}" if prefix else name,
            default=default.lower() if isinstance(info.default, bool) else default,
            unit=str(extra.get("unit", "")) if isinstance(extra, dict) else "",
            words=_choices(info.annotation) or (("true", "false") if info.annotation in (bool, bool | None) else ()),
            limits=_format_limits(info),
            meaning=info.description or "",
        )


def list_keys(workload: str = registry.DEFAULT_WORKLOAD) -> list[Key]:
    found = list_sections(workload).items()
    return [key for name, section in found for key in iter_keys(section, "" if name == "run" else name)]


def suggest_key(option: str, value: str = "") -> str:
    """Return a hint with the key that an unknown option means; "" if none is near."""
    word = option.lstrip("-").partition("=")[0].replace("-", "_")
    value = option.partition("=")[2] or value
    names = {key.name.rpartition(".")[2]: key.name for key in reversed(list_keys())}
    found = names.get(FOREIGN_NAMES.get(word, word)) or (word if word in names.values() else "")
    if found:
        given = value if value and not value.startswith("-") and "=" not in value else "VALUE"
        return f"; a value of the run file is typed as  {found}={given}"
    return did_you_mean(word, names, cutoff=0.7, shown=names)


def _format_limits(info: FieldInfo) -> str:
    if _choices(info.annotation):
        return "a whole number" if "Annotated[int" in str(info.annotation) else ""
    return " and ".join(
        f"{sign} {_format_limit(value)}"
        for name, sign in SIGNS
        for value in (getattr(limit, name, None) for limit in info.metadata)
        if value is not None
    )


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words of a choice, also inside a list of choices."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = [kind for kind in get_args(annotation) if kind not in (NoneType, Ellipsis)]
    return next((words for kind in inner if (words := _choices(kind))), ())


def _format_limit(value: float) -> str:
    power = int(value).bit_length() - 1
    if value == 2**power and power > 15:
        return f"2^{power}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def run_keys(args: argparse.Namespace) -> int:
    console = build_console()
    workload, words = args.workload or registry.DEFAULT_WORKLOAD, args.asked
    known = list_keys(workload)
    found = _find_keys(known, words)
    names = [] if found or args.workload else [name for name in registry.BUILT_IN if name != workload]
    others = {name: keys for name in names if (keys := _find_keys(list_keys(name), words))}
    sections = list(list_sections(workload))
    if not (found or others):
        everywhere = [key.name for name in registry.BUILT_IN for key in list_keys(name)]
        names = [*sections, *everywhere, *(name.rpartition(".")[2] for name in everywhere)]
        hint = did_you_mean(words[0], names) or f"; the sections are {', '.join(sections)}"
        of = workload if args.workload else "any workload"
        message = f"no key of {of} has {words[0]!r} in its name or meaning{hint}"
        raise UserError(message, code="unknown-key", key=words[0])
    groups = {workload: found, **others}
    if args.json:
        rows = [(name, key) for name, keys in groups.items() for key in keys]
        print_json([{**asdict(key), "allowed": key.allowed, "workload": name} for name, key in rows])
        return 0
    for name, keys in groups.items():
        if name != workload:
            console.print(f"of the workload {name}:")
        for key in keys:
            console.print(_render_key(key), soft_wrap=False)
    if not words:
        workloads = ", ".join(registry.BUILT_IN)
        console.print(f"model and data are those of {workload}; --workload takes {workloads}")
    return 0


def _find_keys(known: Sequence[Key], words: Sequence[str]) -> list[Key]:
    """Return the keys that words name or, if they name none, those in which a word occurs."""
    exact = [key for key in known if key.name in words]
    return exact or [key for key in known if not words or any(_matches(key, word) for word in words)]


def _matches(key: Key, word: str) -> bool:
    """Return whether a word names the key or its section, or begins a word of its name or meaning."""
    if word == "run":
        return "." not in key.name
    if word in SECTIONS:
        return key.name.startswith(f"{word}.")
    return re.search(rf"(\b|_){re.escape(word)}", f"{key.name} {key.meaning}", re.IGNORECASE) is not None


def _render_key(key: Key) -> Any:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    default = f"  {key.default}" if key.default else "  none"
    head = Text.assemble((key.name, "bold"), default, (f" {key.unit}" if key.unit else "", "dim"))
    allowed = f" ({key.allowed})" if key.allowed else ""
    return Group(head, Padding(Text(f"{key.meaning}{allowed}"), (0, 0, 0, 4)))


def run_completion(args: argparse.Namespace) -> int:
    from paceline.cli.main import build_parser, list_verbs

    commands, keys = build_parser(list(list_verbs())), [key.name for key in list_keys() if "." in key.name]
    if args.json:
        helps, options = list_options(commands)
        verbs = {verb: {"about": help, "options": options[verb]} for verb, help in helps.items()}
        print_json({"verbs": verbs, "keys": keys})
    elif args.shell is None:
        usage = 'eval "$(paceline completion bash)",  or zsh or fish'
        raise UserError(f"no shell given; write it as  {usage}", code="missing-value")
    else:
        print_text(build_completion_script(args.shell, commands, keys))
    return 0


def build_completion_script(shell: str, parser: argparse.ArgumentParser, keys: Sequence[str]) -> str:
    """Build a script that completes words without starting Python."""
    from paceline.io.html_page import compile_template

    helps, options = list_options(parser)
    template = compile_template(
        Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8"), html=False, quote=shlex.quote
    )
    return f"{template.render(helps=helps, options=options, keys=keys)}\n"


def list_options(parser: argparse.ArgumentParser) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the help and the options of each verb."""
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    options = {
        name: [word for action in verb._actions for word in action.option_strings if word.startswith("--")]
        for name, verb in verbs.choices.items()
    }
    return {name: verb.description or "" for name, verb in verbs.choices.items()}, options


def build_schema(kind: str) -> dict[str, Any]:
    """Return the schema of one kind of file: run, cluster or site."""
    if kind == "run":
        return build_run_schema()
    from paceline.hardware.catalogue import ClusterFile
    from paceline.slurm.site_file import SiteFile

    section = ClusterFile if kind == "cluster" else SiteFile
    return _finish_schema(f"A {kind} file of Paceline", section.model_json_schema())


def run_schema(args: argparse.Namespace) -> int:
    print_json(build_schema(args.kind))
    return 0


def build_run_schema() -> dict[str, Any]:
    """Return the schema of run files; `model` and `data` have the keys of the workload that the file names."""
    kinds = {name: find_entry(name).sections() for name in BUILT_IN}
    sections = {section for kind in kinds.values() for section in kind.values()} | set(FIXED_SECTIONS.values())
    references, top = models_json_schema([(section, MODE) for section in sections], ref_template="#/$defs/{model}")

    def refer(section: type[BaseModel]) -> dict[str, Any]:
        reference: dict[str, Any] = references[section, MODE]
        one_word = issubclass(section, Section) and section.word
        return {"anyOf": [reference, {"type": ["string", "number"]}]} if one_word else reference

    run_keys = RunSpec.model_json_schema()["properties"]
    properties = {key: value for key, value in run_keys.items() if key not in ("model", "data", *FIXED_SECTIONS)}
    properties |= {"model": {}, "data": {}, "train": refer(FIXED_SECTIONS["train"])}
    properties["parallel"] = {"anyOf": [refer(FIXED_SECTIONS["parallel"]), {"const": "auto"}]}
    properties["workload"]["anyOf"] = [{"enum": list_workloads()}, OWN_WORKLOAD]
    rules = [
        {
            "if": {
                "properties": {"workload": {"const": name}},
                "required": [] if name == DEFAULT_WORKLOAD else ["workload"],
            },
            "then": {"properties": {key: refer(section) for key, section in kind.items()}},
        }
        for name, kind in kinds.items()
    ]
    return _finish_schema("A run file of Paceline", {**top, "properties": properties, "allOf": rules})


def _finish_schema(title: str, schema: dict[str, Any]) -> dict[str, Any]:
    about = {"$schema": DRAFT, "title": title, "type": "object", "additionalProperties": False}
    return {**_describe_units({key: value for key, value in schema.items() if key != "title"}), **about}


def _describe_units(node: Any) -> Any:
    """Drop pydantic's titles, and add units to the descriptions that editors show."""
    if isinstance(node, list):
        return [_describe_units(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _describe_units(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    if isinstance(unit := node.get("unit"), str):
        del node["unit"]
        node["description"] = f"{node.get('description', '')} [{unit}]" if unit else node.get("description", "")
    return node
