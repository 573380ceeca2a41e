"""Read other tools' files and texts into settings. Nothing in them is executed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.run_file import record_lines
from paceline.convert.key_tables import KeyTable
from paceline.convert.rules import Translation
from paceline.errors import UserError
from paceline.io.files import explain_unreadable, read_text
from paceline.io.safe_yaml import PlainYamlLoader, YamlLimitError, load_yaml

MAX_BYTES = 1 << 20
"""Of a configuration; a larger file is data."""
Extra = tuple[str, Any, Translation]
"""(key, value, translation) of something that no table has."""


@dataclass(frozen=True)
class Settings:
    """Settings of one tool, from a file, a part of one, or a command line."""

    name: str
    """As it is shown: the file, or the tool of a command."""
    table: KeyTable
    values: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    """What other files it names are relative to."""
    priority: int = 0
    """Added to that of its claims."""
    prefix: str = ""
    """Before each key, as it is shown: the dashes of an option."""
    extra: tuple[Extra, ...] = ()


def read_config_text(file: Path) -> str:
    """Return the text of a file that a person wrote."""
    try:
        text = read_text(file, MAX_BYTES, "utf-8-sig")
    except (OSError, ValueError) as error:
        code, problem = explain_unreadable(file, error)
        raise UserError(f"{file} {problem}", code=code) from None
    if "\0" in text or not text.strip():
        raise UserError(f"{file} {'is not a text' if text.strip() else 'is empty'}", code="unreadable")
    return text


def parse_json(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _build_unique(pairs, name))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{name} is not JSON: {error.msg} ({at})", code="invalid-format") from None
    except RecursionError:
        raise UserError(f"{name} is nested too deeply", code="unreadable") from None
    if not isinstance(value, dict):
        raise UserError(f"{name} holds a {type(value).__name__}, not a set of named values", code="invalid-format")
    return value


def _build_unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(f"{name}: {key!r} is given twice; leave one of them out", code="conflict", key=key)
        found[key] = value
    return found


def parse_yaml(text: str, name: str) -> Any:
    """Return plain values; YAMLError if it is not YAML at all."""
    try:
        return load_yaml(text, lambda node: record_lines(node, "", name, {}), PlainYamlLoader)
    except YamlLimitError as error:
        raise UserError(f"{name} {error}", code="unreadable") from None
