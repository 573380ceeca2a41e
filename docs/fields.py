"""Writes the tables of docs/train.md from the run file's own description of its fields.

    python docs/fields.py

The tables stand between `<!-- fields SECTION -->` and `<!-- end -->`; everything else on the page is left alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline import registry
from paceline.section import Section
from paceline.spec import Parallel, RunSpec, Train

PAGE = Path(__file__).with_name("train.md")
SECTIONS: dict[str, type[BaseModel]] = {"run": RunSpec, "train": Train, "parallel": Parallel} | {
    f"{workload}_{name}": section
    for workload in registry.BUILT_IN
    for name, section in registry.entry_of(workload).sections().items()
}
HEAD = "\n| key | default | unit | allowed | meaning |\n|---|---|---|---|---|\n"
SIGNS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


def rows(section: str) -> list[str]:
    """One line of Markdown for every field of a section, in the order of the run file."""
    prefix = "" if section == "run" else f"{section.rpartition('_')[2]}."
    return [
        f"| `{prefix}{name}` | {_default(info)} | {_unit(info)} | {_allowed(info)} | {info.description} |"
        for name, info in SECTIONS[section].model_fields.items()
        if not _is_section(info)
    ]


def page(text: str) -> str:
    """The page with its tables written anew."""

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{HEAD}" + "\n".join(rows(found[2])) + "\n\n<!-- end -->"

    return re.sub(r"(<!-- fields (\w+) -->).*?<!-- end -->", table, text, flags=re.DOTALL)


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, Section)


def _default(info: FieldInfo) -> str:
    value = info.default
    if value in (None, (), ""):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _unit(info: FieldInfo) -> str:
    extra = info.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def _allowed(info: FieldInfo) -> str:
    words = _words(info.annotation)
    if words:
        number = ", a whole number" if "Annotated[int" in str(info.annotation) else ""
        return ", ".join(f"`{word}`" for word in words) + number
    limits = [
        f"{sign} {_number(value)}"
        for name, sign in SIGNS
        for value in (getattr(limit, name, None) for limit in info.metadata)
        if value is not None
    ]
    if limits:
        return " and ".join(limits)
    return "`true`, `false`" if info.annotation in (bool, bool | None) else ""


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


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
