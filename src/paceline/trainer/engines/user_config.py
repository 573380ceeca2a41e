"""The user's own config file of an engine: it must agree with the run file; `auto` means: as there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UserError
from paceline.io.files import read_text
from paceline.io.safe_yaml import load_yaml

AUTO = "auto"
MOST_BYTES = 1 << 20


def read_tables(engine: str) -> dict[str, Any]:
    """Return what `tables.yaml` says of the config files of an engine."""
    tables: dict[str, Any] = load_yaml(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))[engine]
    return tables


def _read_mapping(path: Path) -> dict[str, Any]:
    at, kind = f"parallel.engine_config: {path}", "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = read_text(path.expanduser(), MOST_BYTES)
        values = json.loads(text) if kind == "JSON" else load_yaml(text)
    except OSError as error:
        raise UserError(f"{at} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{at} is not {kind}: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(values, dict):
        raise UserError(f"{at} holds a {type(values).__name__}, not named values")
    return values


def read_user_config(path: Path, rejected: Mapping[str, str], ours: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Read the file; raise UserError if it contradicts the run file.

    `rejected`: unsupported keys, with the reason. `ours`: for keys of the file, the value of the run file and
    the setting that it follows from.
    """
    theirs = _read_mapping(path)
    for name, why in rejected.items():
        if get_nested(theirs, name) not in (None, AUTO, False, {}):
            raise UserError(f"{path}: {name} is not supported: {why}; remove it from that file")
    for name, (value, setting) in ours.items():
        other = get_nested(theirs, name)
        if other not in (None, AUTO, value) or (isinstance(other, bool) and other is not value):
            differs = f"{name} is {json.dumps(other)}, but the run file says {setting}"
            raise UserError(f"{path}: {differs}; remove {name} from that file, or write {json.dumps(value)}")
    return theirs


def merge_config(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ours over theirs, section by section; drop remaining `auto` values."""
    joined = {
        name: merge_config(value, {}) if isinstance(value, dict) else value
        for name, value in theirs.items()
        if value != AUTO
    }
    for name, value in ours.items():
        inner = joined.get(name)
        joined[name] = merge_config(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return joined


def get_nested(values: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a dotted key such as `zero_optimization.stage`, or None."""
    found: Any = values
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
