"""Keyword arguments of Python calls as values of a run file: `train(Net, lr=1e-3, ranks=2)`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.run_spec import DEFAULT, RunSpec, anchor_values
from paceline.errors import UserError, did_you_mean

SECTIONS = ("train", "parallel", "model", "data")
LENGTHS = {"train.epochs": "train.steps", "train.steps": "train.epochs"}


def apply_settings(spec: RunSpec, settings: Mapping[str, Any]) -> RunSpec:
    """Return the spec with keyword arguments, each named as its field or, with its section, by a dict."""
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
