"""A run file as plain values: YAML with the line of each value, and overrides."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import Code, UserError
from paceline.io.files import explain_unreadable
from paceline.io.safe_yaml import YamlLimitError, load_yaml, read_yaml_text

MAX_DEPTH = 16


def parse_overrides(given: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides by their dotted keys, whether typed as `section.key=value` or given as values."""
    return dict(given) if isinstance(given, Mapping) else dict(map(_parse_override, given))


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        usage = "write it as  section.key=value,  for example train.lr=3e-4"
        raise UserError(f"{text!r} is not an override; {usage}", code="invalid-value", key=text)
    if not value.strip():
        usage = f"write it as  {key}=VALUE,  or  {key}=null  for none"
        raise UserError(f"{text!r} has no value; {usage}", code="missing-value", key=key)
    try:
        return key, load_yaml(value)
    except yaml.YAMLError:
        return key, value
    except YamlLimitError as error:
        raise UserError(f"{key}: {value[:40]!r}… {error}", code="invalid-value", key=key) from None


def set_nested(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dicts."""
    *sections, last = key.split(".")
    if len(sections) > MAX_DEPTH:
        raise UserError(f"{key[:40]}… has {len(sections)} dots; no key has so many", code="unknown-key", key=key)
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            both = f"{section}={inner} and {key}={value}"
            raise UserError(f"{both} contradict each other; leave one of them out", code="conflict", key=key)
        values = inner
    values[last] = value


def read_yaml_file(
    file: Path, kind: str = "run file", example: str = "name: my-run"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a run file, or another kind of YAML file; return its values and the line of each."""
    origins: dict[str, str] = {}
    code: Code = "unreadable"
    text = ""
    try:
        text = read_yaml_text(file)
        values = load_yaml(text, lambda node: record_lines(node, "", file.name, origins))
        if isinstance(values, dict):
            return values, origins
        code, problem = "invalid-format", f"holds no sections; start it with  {example}"
    except UserError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        parts = [getattr(error, part, None) for part in ("context", "problem")]
        reason = ", ".join(filter(None, parts)) or str(error).splitlines()[0]
        code, problem = "invalid-format", f"is not YAML{at}: {reason}"
    except YamlLimitError as error:
        problem = str(error)
    except (OSError, ValueError) as error:
        code, problem = explain_unreadable(file, error)
    if text.startswith("#!"):
        problem = f"is a script; to make a run file of it:  paceline adopt {file}"
    raise UserError(f"{kind} {str(file)!r} {problem}", code=code, key=str(file)) from None


def record_lines(node: Any, prefix: str, file: str, origins: dict[str, str]) -> None:
    """Record the line of each dotted key below a YAML node; UserError if a mapping has a key twice."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.tag.endswith(":merge"):  # <<: *another
                record_lines(value, prefix, file, origins)
                continue
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if name in seen:
                raise UserError(f"{name}: given twice ({file} line {line})", code="conflict", key=name)
            seen.add(name)
            origins[name] = f"{file} line {line}"
            record_lines(value, f"{name}.", file, origins)
