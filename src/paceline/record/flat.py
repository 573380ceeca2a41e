"""Dataclasses as flat JSON objects: what is grouped by type in the program lies side by side in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def to_flat(record: Any) -> dict[str, Any]:
    """Every field of a dataclass by name, those of dataclasses inside it among them."""
    found: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        found |= to_flat(value) if is_dataclass(value) else {field.name: value}
    return found


def from_flat(kind: type[T], values: Mapping[str, Any]) -> T:
    """The inverse: lists become tuples, unknown keys are left out, and what is not there has its default."""
    given: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for name in (field.name for field in fields(kind)):  # type: ignore[arg-type]
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            given[name] = from_flat(hint, values)
        elif name in values:
            is_enum = isinstance(hint, type) and issubclass(hint, Enum)
            given[name] = hint(values[name]) if is_enum else _as_tuple(values[name])
    return kind(**given)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
