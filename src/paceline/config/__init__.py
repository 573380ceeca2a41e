"""The run file: one YAML document, validated, frozen, and able to say where each of its values came from."""

from paceline.config.run_file import parse_overrides
from paceline.config.run_spec import (
    COMMAND_LINE,
    DEFAULT,
    RunSpec,
    SpecSource,
    build_recorded_spec,
    build_section,
    build_spec,
    load,
    resolve_spec,
)
from paceline.config.sections import Parallel, ParameterGroup, Section, Train, field

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Parallel",
    "ParameterGroup",
    "RunSpec",
    "Section",
    "SpecSource",
    "Train",
    "build_recorded_spec",
    "build_section",
    "build_spec",
    "field",
    "load",
    "parse_overrides",
    "resolve_spec",
]
