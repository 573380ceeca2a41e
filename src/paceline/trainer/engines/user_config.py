"""A config file of the user's own, under a run file: what the run file says too must agree, all else is taken over.

Both describe the same run, and two descriptions can contradict each other. Whatever does is refused by its name in
both files; nothing is overruled in silence. `auto` means: as the run file says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UserError
from paceline.io.safe_open import read_text
from paceline.io.safe_yaml import load_yaml

AUTO = "auto"
MOST_BYTES = 1 << 20


def _read(path: Path) -> dict[str, Any]:
    """A JSON or YAML file that holds named values."""
    try:
        text = read_text(path.expanduser(), MOST_BYTES)
        found = json.loads(text) if path.suffix == ".json" else load_yaml(text)
    except OSError as error:
        raise UserError(f"parallel.engine_config: {path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        said = str(error).split("\n", 1)[0]
        raise UserError(f"parallel.engine_config: {path} is not {kind}: {said}") from None
    if not isinstance(found, dict):
        raise UserError(f"parallel.engine_config: {path} holds a {type(found).__name__}, not named values")
    return found


def read_user_config(path: Path, refused: Mapping[str, str], said: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Their values, if they do not contradict the run file.

    `refused`: what must not be in their file, and the reason. `said`: for names in their file, the value that the run
    file has for it and the words it has for that.
    """
    theirs = _read(path)
    for name, why in refused.items():
        if get_nested(theirs, name) not in (None, AUTO, False, {}):
            raise UserError(f"{path}: {name} has no place here: {why}; take it out of that file")
    for name, (value, words) in said.items():
        found = get_nested(theirs, name)
        if found not in (None, AUTO, value) or (isinstance(found, bool) and found is not value):
            raise UserError(
                f"{path}: {name} is {json.dumps(found)}, but the run file says {words}; "
                f"take {name} out of that file, or write {json.dumps(value)}"
            )
    return theirs


def merge_config(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Their values with ours on top, section by section; an `auto` that is left goes, and the library decides."""
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
    """`zero_optimization.stage` of nested values, or None."""
    found: Any = values
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
