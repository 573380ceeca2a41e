"""The run file: one YAML document, validated, frozen, and able to say where each of its values came from."""

from paceline.section import Section, field
from paceline.spec.run_spec import COMMAND_LINE, DEFAULT, RunSpec, Source, build, load, recorded, section_of, spec_of
from paceline.spec.sections import Parallel, ParameterGroup, Train
from paceline.spec.yaml_file import overrides_of

__all__ = [
    "COMMAND_LINE",
    "DEFAULT",
    "Parallel",
    "ParameterGroup",
    "RunSpec",
    "Section",
    "Source",
    "Train",
    "build",
    "field",
    "load",
    "overrides_of",
    "recorded",
    "section_of",
    "spec_of",
]
