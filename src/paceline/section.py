"""A section of the run file: named fields, each with a default, a unit and a meaning, validated and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def field(default: Any, unit: str, meaning: str, **limits: Any) -> Any:
    """A field of the run file: its default, its unit, which `explain` prints, and what it means."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


def _is_huge(value: Any) -> bool:
    """A whole number with which nothing can be reckoned, as a number or as its digits."""
    if isinstance(value, str):
        digits = value.strip().lstrip("+-0").replace("_", "")
        return len(digits) > len(str(MOST)) and digits.isdecimal()
    return isinstance(value, int) and abs(value) > MOST


def contradiction(message: str) -> PydanticCustomError:
    """For a validator: fields that do not go together. The message names them, so that it is said as it is."""
    return PydanticCustomError("contradiction", "{message}", {"message": message})


MOST = 2**63 - 1
"""Of a whole number in a run file."""
STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)


class Section(BaseModel):
    model_config = STRICT

    word: ClassVar[str] = ""
    """The field that is meant where a run file gives one word for the whole section."""
    references: ClassVar[tuple[str, ...]] = ()
    """Fields that name something of the user's own as `file.py:name`; the file is relative to the run file."""
    run_files: ClassVar[tuple[str, ...]] = ()
    """Fields that name run files, which may name code in turn."""

    @classmethod
    def paths(cls) -> list[str]:
        """The fields that name a file or a folder: relative to the run file, where they stand in one."""
        types = {name: (info.annotation, *get_args(info.annotation)) for name, info in cls.model_fields.items()}
        return [name for name, kinds in types.items() if Path in kinds or name == "path"]

    @model_validator(mode="before")
    @classmethod
    def _yes_is_not_a_number(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key, value in values.items():
                known = cls.model_fields.get(key)
                if isinstance(value, bool) and known is not None and "bool" not in str(known.annotation):
                    raise PydanticCustomError("not_a_bool", "{key}|{value}", {"key": key, "value": value})
                if known is not None and "int" in str(known.annotation) and _is_huge(value):
                    raise PydanticCustomError("huge", "{key}", {"key": key})
        return values


class RecordedSection(Section):
    """What a finished run says of work that is not ours: values as they stand, without the code that explains them."""

    model_config = {**STRICT, "extra": "allow"}


class ModelSection(Section):
    """What the section `model` of every training has, beside what its workload adds."""

    start: Path | None = field(
        None, "path", "weights to begin with: a .safetensors file, a run folder, or the folder of a Hugging Face model"
    )
    match: Literal["all", "some"] = field(
        "all", "", "all: start has every tensor of the model and no other; some: what does not fit begins as drawn"
    )


class DataSection(Section):
    """What the section `data` of a workload has whose samples are made in Python."""

    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=1024)] = field(
        "auto",
        "processes",
        "that make samples for each rank; 0 makes them in the rank itself, auto measures for a moment",
    )


@cache
def with_fields_of(section: type[Section], common: type[Section]) -> type[Section]:
    """A workload's section with the fields that all of them have; KeyError where it has one of that name already."""
    if issubclass(common, section):
        return common
    if issubclass(section, common):
        return section
    if taken := section.model_fields.keys() & common.model_fields.keys():
        raise KeyError(min(taken))
    return type(section.__name__, (section, common), {"__module__": section.__module__, "__doc__": section.__doc__})


class RunClass:
    """What every workload derives from: the sections of its run file, and what can be known without its data."""

    Model: ClassVar[type[Section]] = Section
    Data: ClassVar[type[Section]] = Section
    batched: ClassVar[bool] = True
    """A step is a batch of samples; False where it is a pass over all of them."""
