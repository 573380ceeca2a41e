"""A section of the run file: named fields, each with a default, a unit and a meaning, validated and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def field(default: Any, unit: str, meaning: str, **limits: Any) -> Any:
    """A field of the run file: its default, its unit, which `explain` prints, and what it means."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


def contradiction(message: str) -> PydanticCustomError:
    """For a validator: fields that do not go together. The message names them, so that it is said as it is."""
    return PydanticCustomError("contradiction", "{message}", {"message": message})


STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)


class Section(BaseModel):
    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _yes_is_not_a_number(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key, value in values.items():
                known = cls.model_fields.get(key)
                if isinstance(value, bool) and known is not None and "bool" not in str(known.annotation):
                    raise PydanticCustomError("not_a_bool", "{key}|{value}", {"key": key, "value": value})
        return values


class RunClass:
    """What every workload derives from: the sections of its run file, and what can be known without its data."""

    Model: ClassVar[type[Section]] = Section
    Data: ClassVar[type[Section]] = Section
    batched: ClassVar[bool] = True
    """A step is a batch of samples; False where it is a pass over all of them."""
