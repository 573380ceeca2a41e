"""JSON schemas of the YAML files that users write, for editors and language servers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from paceline.config.registry import BUILT_IN, DEFAULT_WORKLOAD, find_entry, list_workloads
from paceline.config.run_spec import FIXED_SECTIONS, RunSpec
from paceline.config.sections import Section

DRAFT = "http://json-schema.org/draft-07/schema#"
MODE: JsonSchemaMode = "validation"
OWN_WORKLOAD = {"type": "string", "pattern": r"(\.py|:\w+)$"}
"""FILE.py:Class, module:Class, or a script."""


def build_run_schema() -> dict[str, Any]:
    """Return the schema of run files; `model` and `data` have the keys of the workload that the file names."""
    kinds = {name: find_entry(name).sections() for name in BUILT_IN}
    sections = {section for kind in kinds.values() for section in kind.values()} | set(FIXED_SECTIONS.values())
    references, top = models_json_schema([(section, MODE) for section in sections], ref_template="#/$defs/{model}")

    def refer(section: type[BaseModel]) -> dict[str, Any]:
        reference: dict[str, Any] = references[section, MODE]
        one_word = issubclass(section, Section) and section.word
        return {"anyOf": [reference, {"type": ["string", "number"]}]} if one_word else reference

    run_keys = RunSpec.model_json_schema()["properties"]
    properties = {key: value for key, value in run_keys.items() if key not in ("model", "data", *FIXED_SECTIONS)}
    properties |= {"model": {}, "data": {}, "train": refer(FIXED_SECTIONS["train"])}
    properties["parallel"] = {"anyOf": [refer(FIXED_SECTIONS["parallel"]), {"const": "auto"}]}
    properties["workload"]["anyOf"] = [{"enum": list_workloads()}, OWN_WORKLOAD]
    rules = [
        {
            "if": {
                "properties": {"workload": {"const": name}},
                "required": [] if name == DEFAULT_WORKLOAD else ["workload"],
            },
            "then": {"properties": {key: refer(section) for key, section in kind.items()}},
        }
        for name, kind in kinds.items()
    ]
    return _finish("A run file of Paceline", {**top, "properties": properties, "allOf": rules})


def build_section_schema(title: str, section: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a file that is one section."""
    return _finish(title, section.model_json_schema())


def _finish(title: str, schema: dict[str, Any]) -> dict[str, Any]:
    about = {"$schema": DRAFT, "title": title, "type": "object", "additionalProperties": False}
    return {**_describe_units({key: value for key, value in schema.items() if key != "title"}), **about}


def _describe_units(node: Any) -> Any:
    """Drop pydantic's titles, and add units to the descriptions that editors show."""
    if isinstance(node, list):
        return [_describe_units(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _describe_units(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    if isinstance(unit := node.get("unit"), str):
        del node["unit"]
        node["description"] = f"{node.get('description', '')} [{unit}]" if unit else node.get("description", "")
    return node
