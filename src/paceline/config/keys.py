"""The keys of a run file: default, unit, what is allowed and what it means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.config import registry
from paceline.config.run_spec import FIXED_SECTIONS, FOREIGN_NAMES, RunSpec
from paceline.config.sections import Section
from paceline.errors import did_you_mean

SIGNS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


@dataclass(frozen=True)
class Key:
    name: str
    """Dotted, as it is typed."""
    default: str
    unit: str
    words: tuple[str, ...]
    """The choices, if it is one."""
    limits: str
    meaning: str

    @property
    def allowed(self) -> str:
        return ", ".join((*self.words, *filter(None, [self.limits])))


def list_sections(workload: str = registry.DEFAULT_WORKLOAD) -> dict[str, type[BaseModel]]:
    """Return the sections of a run file by name; "run" has the keys outside of sections."""
    return {"run": RunSpec, **registry.find_entry(workload).sections(), **FIXED_SECTIONS}


def iter_keys(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a section, in the order of the run file."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            continue
        extra = info.json_schema_extra
        default = "" if info.default in (None, (), "") else str(info.default)
        yield Key(
            name=f"{prefix}.{name}" if prefix else name,
            default=default.lower() if isinstance(info.default, bool) else default,
            unit=str(extra.get("unit", "")) if isinstance(extra, dict) else "",
            words=_choices(info.annotation) or (("true", "false") if info.annotation in (bool, bool | None) else ()),
            limits=_format_limits(info),
            meaning=info.description or "",
        )


def list_keys(workload: str = registry.DEFAULT_WORKLOAD) -> list[Key]:
    found = list_sections(workload).items()
    return [key for name, section in found for key in iter_keys(section, "" if name == "run" else name)]


def suggest_key(option: str, value: str = "") -> str:
    """Return a hint with the key that was meant by an option which a verb does not have; "" if none is near."""
    word = option.lstrip("-").partition("=")[0].replace("-", "_")
    value = option.partition("=")[2] or value
    names = {key.name.rpartition(".")[2]: key.name for key in reversed(list_keys())}
    found = names.get(FOREIGN_NAMES.get(word, word)) or (word if word in names.values() else "")
    if found:
        given = value if value and not value.startswith("-") and "=" not in value else "VALUE"
        return f"; a value of the run file is typed as  {found}={given}"
    return did_you_mean(word, names, cutoff=0.7, shown=names)


def _format_limits(info: FieldInfo) -> str:
    if _choices(info.annotation):
        return "a whole number" if "Annotated[int" in str(info.annotation) else ""
    return " and ".join(
        f"{sign} {_format_limit(value)}"
        for name, sign in SIGNS
        for value in (getattr(limit, name, None) for limit in info.metadata)
        if value is not None
    )


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words of a choice, also inside a list of choices."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = [kind for kind in get_args(annotation) if kind not in (NoneType, Ellipsis)]
    return next((words for kind in inner if (words := _choices(kind))), ())


def _format_limit(value: float) -> str:
    power = int(value).bit_length() - 1
    if value == 2**power and power > 15:
        return f"2^{power}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
