"""What a run file may say: every key with its default, its unit, what is allowed and what it means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.config import registry
from paceline.config.run_spec import ELSEWHERE, RunSpec
from paceline.config.sections import Parallel, Section, Train
from paceline.errors import did_you_mean

SIGNS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


@dataclass(frozen=True)
class Key:
    name: str
    """Dotted, as it is typed."""
    default: str
    """Empty where there is none."""
    unit: str
    words: tuple[str, ...]
    """That are allowed, where it is a choice."""
    limits: str
    """What else is allowed."""
    meaning: str

    @property
    def allowed(self) -> str:
        return ", ".join((*self.words, *filter(None, [self.limits])))


def list_sections(workload: str = registry.DEFAULT_WORKLOAD) -> dict[str, type[BaseModel]]:
    """The sections of a run file, by name; what stands outside of them is "run"."""
    return {"run": RunSpec, **registry.find_entry(workload).sections(), "train": Train, "parallel": Parallel}


def iter_keys(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """The keys of a section, in the order of the run file."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            continue
        extra = info.json_schema_extra
        yield Key(
            name=f"{prefix}.{name}" if prefix else name,
            default=_default(info.default),
            unit=str(extra.get("unit", "")) if isinstance(extra, dict) else "",
            words=_words(info.annotation) or (("true", "false") if info.annotation in (bool, bool | None) else ()),
            limits=_limits(info),
            meaning=info.description or "",
        )


def list_keys(workload: str = registry.DEFAULT_WORKLOAD) -> list[Key]:
    found = list_sections(workload).items()
    return [key for name, section in found for key in iter_keys(section, "" if name == "run" else name)]


def suggest_key(option: str, value: str = "") -> str:
    """For an option that a verb does not have: the key of the run file that was meant; empty where none is near."""
    word = option.lstrip("-").partition("=")[0].replace("-", "_")
    value = option.partition("=")[2] or value
    names = {key.name.rpartition(".")[2]: key.name for key in reversed(list_keys())}
    found = names.get(ELSEWHERE.get(word, word)) or (word if word in names.values() else "")
    if found:
        given = value if value and not value.startswith("-") and "=" not in value else "VALUE"
        return f"; a value of the run file is typed as  {found}={given}"
    return did_you_mean(word, names, cutoff=0.7, shown=names)


def _default(value: Any) -> str:
    if value in (None, (), ""):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _limits(info: FieldInfo) -> str:
    if _words(info.annotation):
        return "a whole number" if "Annotated[int" in str(info.annotation) else ""
    return " and ".join(
        f"{sign} {_number(value)}"
        for name, sign in SIGNS
        for value in (getattr(limit, name, None) for limit in info.metadata)
        if value is not None
    )


def _words(annotation: Any) -> tuple[str, ...]:
    """The words of a choice, also inside a list of choices."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = [kind for kind in get_args(annotation) if kind not in (NoneType, Ellipsis)]
    return next((words for kind in inner if (words := _words(kind))), ())


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return (
        f"2^{power}" if value == 2**power and power > 15 else f"{value:,}" if isinstance(value, int) else f"{value:g}"
    )
