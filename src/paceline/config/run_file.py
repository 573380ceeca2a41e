"""A run file as plain values: YAML as people write it, the line of each value, and overrides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UserError, did_you_mean
from paceline.io.safe_yaml import YamlLimitError, load_yaml, read_yaml_text

MOST_SECTIONS = 16
"""Around a value, for an override."""

RENAMED_KEYS = {
    "model.start": "model.init_from",
    "parallel.checkpointing": "parallel.activation_checkpointing",
    "train.checkpoint": "train.checkpoint_format",
}
"""Keys of older versions: an unknown key is answered with the new one, and run folders stay readable."""


def rename_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded values of a run with the keys of older versions renamed."""
    renamed = dict(values)
    for old, new in RENAMED_KEYS.items():
        section, name = old.split(".")
        inside = renamed.get(section)
        if not isinstance(inside, dict) or name not in inside:
            continue
        if old != "model.start" or "match" in inside:  # a workload may have its own `start`
            to = new.partition(".")[2]
            renamed[section] = {to if key == name else key: value for key, value in inside.items()}
    return renamed


def parse_overrides(given: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """By their dotted keys, whether they were typed as `section.key=value` or given as values."""
    return dict(given) if isinstance(given, Mapping) else dict(map(_split, given))


def _split(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r} is not an override; write it as  section.key=value,  for example train.lr=3e-4")
    if not value.strip():
        raise UserError(f"{text!r} has no value; write it as  {key}=VALUE,  or  {key}=null  for none")
    try:
        return key, load_yaml(value)
    except yaml.YAMLError:
        return key, value
    except YamlLimitError as error:
        raise UserError(f"{key}: {value[:40]!r}… {error}") from None


def set_nested(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    if len(sections) > MOST_SECTIONS:
        raise UserError(f"{key[:40]}… has {len(sections)} dots; no key has more than {MOST_SECTIONS}")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UserError(f"{section}={inner} and {key}={value} contradict each other; leave one of them out")
        values = inner
    values[last] = value


def read_yaml_file(
    file: Path, kind: str = "run file", example: str = "name: my-run"
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a run file, or of another kind of file, and the line of each."""
    given = f"{kind} {str(file)!r}"
    origins: dict[str, str] = {}
    try:
        values = load_yaml(read_yaml_text(file), lambda node: _note_lines(node, "", file.name, origins))
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
    except YamlLimitError as error:
        raise UserError(f"{given} {error}") from None
    except UserError:
        raise
    except ValueError as error:  # a path that no file can have
        raise UserError(f"{given} cannot be read: {error}") from None
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
