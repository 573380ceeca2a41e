"""Files and texts as they come: read with care, nothing in them is run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.convert.rules import Rule, Ruling
from paceline.errors import UserError, did_you_mean
from paceline.io.safe_open import open_regular

MOST_BYTES = 1 << 20
"""Of a configuration; what is larger is data."""
MOST_KEYS = 5000
"""Of a configuration; aliases of YAML can stand for billions."""


Unsaid = Callable[[Mapping[str, Any]], Iterable[tuple[str, Any, Ruling]]]
"""From flat values to (key, value, ruling)."""
Together = Callable[[Mapping[str, Any]], Mapping[str, Ruling]]
"""From flat values to rulings by key; ValueError, with the key, where a value cannot be read."""


@dataclass(frozen=True)
class KeyTable:
    """The keys of one tool. A key that ends with `.*` stands for all below it."""

    tool: str
    rules: Mapping[str, Rule]
    marks: frozenset[str] = frozenset()
    """Keys by which a file of this tool is recognised: top-level ones, or dotted."""
    unsaid: Unsaid | None = None
    """What the tool does where nothing is said, and Paceline would not."""
    together: Together | None = None
    """What keys mean that depend on each other."""
    ours: bool = False
    """A run file of Paceline, whose defaults are its own."""
    dashed: bool = False
    """Its options are written with `-`, where tables have `_`."""

    def rule(self, key: str) -> Rule | None:
        """Of a dotted key, by itself or by what it stands below."""
        parts = key.split(".")
        above = [".".join(parts[:n]) + ".*" for n in range(len(parts) - 1, 0, -1)]
        return next((self.rules[name] for name in (key, f"{key}.*", *above) if name in self.rules), None)

    def near(self, key: str) -> str:
        """The end of a sentence about a key that is not known."""
        return did_you_mean(key, [name.removesuffix(".*") for name in self.rules], cutoff=0.75)

    def likeness(self, values: Mapping[str, Any]) -> int:
        """How many of a file's keys are this tool's own."""
        return len(self.marks & {*values, *(key for key, _ in flatten_keys(values))})


@dataclass(frozen=True)
class Settings:
    """Settings of one tool, from a file, a part of one, or a command line."""

    name: str
    """As it is shown: the file, or the tool of a command."""
    table: KeyTable
    values: Mapping[str, Any]
    folder: Path = Path()
    """What other files it names are relative to."""
    weight: int = 0
    """Added to that of its claims."""
    prefix: str = ""
    """Before each key, as it is shown: the dashes of an option."""
    extra: tuple[tuple[str, Any, Ruling], ...] = field(default=())
    """(key, value, ruling) of what no table says."""


def flatten_keys(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Dotted keys and values; an empty section is a value."""
    found = list(itertools.islice(_walk(values, ""), MOST_KEYS + 1))
    if len(found) > MOST_KEYS:
        raise UserError(f"more than {MOST_KEYS} keys in one file, and no configuration has as many")
    return found


def _walk(values: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _walk(value, f"{key}.")
        else:
            yield key, value


def read_config_text(file: Path) -> str:
    """The text of a file, if it is one that a person wrote."""
    try:
        with open_regular(file) as handle:
            content = handle.read(MOST_BYTES + 1)
    except FileNotFoundError:
        near = sorted(file.parent.glob("*")) if file.parent.is_dir() else []
        raise UserError(f"{file} does not exist{did_you_mean(file.name, [p.name for p in near])}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder; name the files in it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{file} is larger than 1 MB, and no configuration is")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not a text in UTF-8") from None
    if "\0" in text:
        raise UserError(f"{file} is not a text")
    return text


def parse_json(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, name))
    except json.JSONDecodeError as error:
        raise UserError(f"{name} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{name} is nested without end") from None
    if not isinstance(value, dict):
        raise UserError(f"{name} holds a {type(value).__name__}, not a set of named values")
    return value


def _once(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(f"{name}: {key!r} is given twice; leave one of them out")
        found[key] = value
    return found


def parse_yaml(text: str, name: str) -> Any:
    """Plain values; a YAMLError where it is no YAML at all."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _keys_once(node, name)
        return loader.construct_document(node) if node else None
    except RecursionError:
        raise UserError(f"{name} is nested without end") from None
    finally:
        loader.dispose()


def _keys_once(node: Any, name: str, above: str = "", done: set[int] | None = None) -> None:
    done = set() if done is None else done
    if not isinstance(node, yaml.MappingNode) or id(node) in done:
        return
    done.add(id(node))  # an alias stands for what was looked at already
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{name}: line {key.start_mark.line + 1} has a key that is not a word")
        if key.value in seen and not key.tag.endswith(":merge"):
            raise UserError(f"{name}: {above}{key.value} is given twice (line {key.start_mark.line + 1})")
        seen.add(key.value)
        _keys_once(value, name, f"{above}{key.value}.", done)
