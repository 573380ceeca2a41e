"""A run file as plain values: YAML as people write it, the line of each value, and overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UserError, did_you_mean


def overrides_of(given: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """By their dotted keys, whether they were typed as `section.key=value` or given as values."""
    return dict(given) if isinstance(given, Mapping) else dict(map(_split, given))


def _split(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r} is not an override; write it as  section.key=value,  for example train.lr=3e-4")
    if not value.strip():
        raise UserError(f"{text!r} has no value; write it as  {key}=VALUE,  or  {key}=null  for none")
    try:
        return key, yaml.load(value, _Loader)
    except yaml.YAMLError:
        return key, value


def put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"{section}={inner} and {key}={value} contradict each other; leave one of them out")
        values = inner
    values[last] = value


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `off`, `no` and 2024-01-01 are words, and true and false the only truth values.

    `+2` is a word too: it adds to something.
    """

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, TypeError, KeyError) as error:
            shown = f"{node.value:.40}" if isinstance(node.value, str) else "this"
            why = f"{shown!r} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(problem=why, problem_mark=node.start_mark) from error


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, form)
        for tag, form in forms
        if not tag.endswith((":bool", ":timestamp")) and not (first == "+" and tag.endswith(":int"))
    ]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF"))


MOST_VALUES = 100_000
"""In a run file; a few lines of aliases to aliases can stand for billions."""


OPEN = -1
"""In place of the number of values of a node that is being counted."""


def _expanded(node: Any, known: dict[int, int]) -> int:
    """How many values a node stands for, with its aliases followed; each is counted once, so this takes no time."""
    if node is None:
        return 0
    if known.get(id(node)) == OPEN:
        raise RecursionError(f"line {node.start_mark.line + 1} holds itself")
    if id(node) not in known:
        known[id(node)] = OPEN
        inside = node.value if isinstance(node.value, list) else []
        parts = [part for item in inside for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


class TooMuch(ValueError):
    """More than anybody writes."""


def parsed(text: str, look: Callable[[Any], None] = lambda node: None) -> Any:
    """The values of a document. Of one that stands for too much, nothing is made.

    `look` is given the root node as it is written; merged mappings are one once the values are made.
    """
    loader = _Loader(text)
    node = loader.get_single_node()
    if _expanded(node, {}) > MOST_VALUES:
        raise TooMuch(f"has more than {MOST_VALUES:,} values once its aliases are followed")
    look(node)
    return loader.construct_document(node) if node else None


def read_yaml(
    file: Path, kind: str = "run file", example: str = "name: my-run"
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a run file, or of another kind of file, and the line of each."""
    given = f"{kind} {str(file)!r}"
    origins: dict[str, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
        values = parsed(text, lambda node: _note_lines(node, "", file.name, origins))
    except FileNotFoundError:
        near = sorted(file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        raise UserError(f"{given} does not exist{did_you_mean(file.name, [p.name for p in near])}") from None
    except IsADirectoryError:
        hint = f"; to go on with this run:  paceline train --resume {file}" if (file / "spec.yaml").is_file() else ""
        raise UserError(f"{given} is a folder{hint}") from None
    except OSError as error:
        raise UserError(f"{given} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{given} is not a text in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        parts = [getattr(error, part, None) for part in ("context", "problem")]
        why = ", ".join(filter(None, parts)) or str(error).splitlines()[0]
        raise UserError(f"{given} is not YAML{at}: {why}") from None
    except RecursionError:
        raise UserError(f"{given} is nested without end") from None
    except TooMuch as error:
        raise UserError(f"{given} {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{given} holds no sections; start it with  {example}")
    return values, origins


def _note_lines(node: Any, prefix: str, file: str, origins: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.tag.endswith(":merge"):  # <<: *another
                _note_lines(value, prefix, file, origins)
                continue
            name = f"{prefix}{key.value}"
            if name in seen:
                raise UserError(f"{name}: given twice ({file} line {key.start_mark.line + 1})")
            seen.add(name)
            origins[name] = f"{file} line {key.start_mark.line + 1}"
            _note_lines(value, f"{name}.", file, origins)
