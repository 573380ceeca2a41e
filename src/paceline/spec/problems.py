"""What is wrong with a run file, as sentences: the value, where it was given, and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from paceline.errors import did_you_mean

ELSEWHERE = {"batch_size": "global_batch", "learning_rate": "lr", "gpus": "ranks", "nproc_per_node": "ranks"}
"""Names that other tools have for ours, for the hint that follows an unknown key."""


def sentence(problem: Any, prefix: str, everywhere: Mapping[str, type[BaseModel]], origins: Mapping[str, str]) -> str:
    """One pydantic problem as one sentence for a person."""
    place = [prefix, *map(str, problem["loc"])] if prefix else [*map(str, problem["loc"])]
    key = ".".join(place)
    where = next((origins[k] for k in (key, ".".join(place[:2]), place[0]) if k in origins), "") if place else ""
    at = f" ({where})" if where else ""
    given = _short(problem["input"])
    match problem["type"]:
        case "extra_forbidden":
            return f"{key}: there is no such key{_meant(place, everywhere)}{at}"
        case "invalid_key":
            return f"{key}: a key must be a word{at}"
        case "missing":
            return f"{key}: not given, and it has no default{at}"
        case "literal_error":
            return f"{key}: {given} is not allowed; use one of {problem['ctx']['expected'].replace(' or ', ', ')}{at}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{key}: {given} is not a whole number{at}"
        case "float_parsing" | "float_type" | "finite_number":
            return f"{key}: {given} is not a number{at}"
        case "bool_parsing" | "bool_type":
            return f"{key}: {given} is neither true nor false{at}"
        case "path_type":
            return f"{key}: {given} is not a path{at}"
        case "string_type":
            return f"{key}: {given} is not a word{at}"
        case "tuple_type" | "list_type":
            return f"{key}: {given} is not a list; write it as  {key}=[{problem['input']}]{at}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"{key}: {given} is out of range; it must be {problem['msg'].split('should be ')[-1]}{at}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key}: {given} is not a section; write it as  {key}: {{key: value}}{at}"
        case "string_pattern_mismatch":
            return f"{key}: {given} cannot name a folder; use letters, digits, '.', '_' and '-'{at}"
        case "not_a_bool":
            key = f"{key}.{problem['ctx']['key']}"
            at = f" ({origins[key]})" if key in origins else ""
            return f"{key}: {problem['ctx']['value']!r} is not a number or a word{at}"
        case "heads" | "length":
            return str(problem["msg"])
        case "value_error" | "assertion_error":
            return f"{key}: {problem['ctx']['error']}{at}"
        case _:
            return f"{key}: {given}: {problem['msg']}{at}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _meant(place: Sequence[str], everywhere: Mapping[str, type[BaseModel]]) -> str:
    """For an unknown key: the nearest one in its section or, where that is nearer, in another."""
    section, word = place[0] if len(place) > 1 else "", place[-1]
    here = everywhere[section].model_fields
    names = {leaf: f"{name}.{leaf}".strip(".") for name, kind in everywhere.items() for leaf in kind.model_fields}
    names |= {leaf: f"{section}.{leaf}".strip(".") for leaf in here}
    hint = did_you_mean(ELSEWHERE.get(word, word), names, cutoff=0.6, shown=names)
    return hint or f"; known here: {', '.join(here) or 'nothing'}"
