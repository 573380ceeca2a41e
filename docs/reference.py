"""Fill the reference pages of the site: verbs from the parser, keys from the sections, functions from the docstrings.

A page has `<!-- fill WHAT -->` where its tables go; `docs/site.py` fills them when it builds the site.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.cli.keys import Key, iter_keys
from paceline.cli.main import build_parser, list_verbs
from paceline.config import Parallel, RunSpec, Train, registry

SOURCE = Path(__file__).parents[1] / "src"
PUBLIC = {
    "paceline": "__init__.pyi",
    "paceline.data": "data/__init__.pyi",
    "paceline.topics": "workloads/topics/__init__.pyi",
}
RETURNED = ("script.api.ScriptRun", "inference.trained_model.Predictions")
"""Classes that public functions return, beside those that can be imported."""
SECTIONS: dict[str, type[BaseModel]] = {"run": RunSpec, "train": Train, "parallel": Parallel} | {
    f"{workload}_{name}": section
    for workload in registry.BUILT_IN
    for name, section in registry.find_entry(workload).sections().items()
}


def fill_page(text: str) -> str:
    """Return the text of a page with what its marks ask for."""

    def fill(mark: re.Match[str]) -> str:
        lines = list_functions() if mark[1] == "functions" else list_verb_options() if mark[1] == "verbs" else None
        return "\n".join(lines or list_keys(mark[1]))

    return re.sub(r"<!-- fill (\w+) -->", fill, text)


def list_keys(section: str) -> Iterator[str]:
    """Yield a table of the keys of a section."""
    yield "| key | default | unit | allowed | meaning |\n|---|---|---|---|---|"
    for key in iter_keys(SECTIONS[section], "" if section == "run" else section.rpartition("_")[2]):
        yield _format_key(key)


def _format_key(key: Key) -> str:
    default = f"`{key.default}`" if key.default else "none"
    allowed = ", ".join((*(f"`{word}`" for word in key.words), *filter(None, [key.limits])))
    return f"| `{key.name}` | {default} | {key.unit} | {allowed} | {key.meaning} |"


def list_verb_options() -> Iterator[str]:
    """Yield a section for each verb, with its arguments."""
    parser = build_parser(list(list_verbs()))
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, verb in list_verbs().items():
        yield f"## {name}\n\n{verb.help[:1].upper()}{verb.help[1:]}.\n"
        rows = [action for action in verbs.choices[name]._actions if action.help != argparse.SUPPRESS]
        rows = [action for action in rows if not {"--help", "--json"} & set(action.option_strings)]
        if rows:
            yield "| argument | what it does |\n|---|---|"
            yield from map(_format_argument, rows)
            yield ""


def _format_argument(action: argparse.Action) -> str:
    shown = action.metavar or "|".join(map(str, action.choices or ())) or action.dest
    names = ", ".join(action.option_strings)
    words = f"{names} {shown}" if names and action.nargs != 0 else names or str(shown)
    words, about = (text.replace("%%", "%").replace("|", "\\|") for text in (words, action.help or ""))
    return f"| `{words}` | {about} |"


def list_functions() -> Iterator[str]:
    """Yield the public functions with their signatures, then the classes with their members; nothing is imported."""
    import griffe

    package = griffe.load("paceline", search_paths=[SOURCE])
    for module, file in PUBLIC.items():
        lines = (SOURCE / "paceline" / file).read_text(encoding="utf-8")
        names = re.findall(r"^from (.+) import .* as (\w+)$", lines, re.MULTILINE)
        paths = [f"{place.removeprefix('paceline.')}.{name}" for place, name in names]
        public = [package[path] for path in (*paths, *(RETURNED if module == "paceline" else ()))]
        for found in sorted(public, key=lambda found: (found.is_class, found.name)):
            yield from _describe_object(found, module)


def _describe_object(found: Any, module: str) -> Iterator[str]:
    if found.is_function:
        signature = f"```python\n{_format_signature(found, module)}\n```"
        yield f"## `{module}.{found.name}`\n\n{signature}\n\n{_read_docstring(found)}\n"
    elif found.is_class:
        yield f"## class `{found.name}`\n\n{_read_docstring(found)}\n"
        told = [member for member in found.all_members.values() if member.docstring and member.name[0] != "_"]
        yield from (f"- `{member.name}`: {' '.join(_read_docstring(member).split())}" for member in told)
        yield ""


def _format_signature(function: Any, module: str) -> str:
    line = f"{module}.{function.signature()}"
    if len(line) <= 110:
        return line
    head, _, rest = line.partition("(")
    arguments, _, returned = rest.rpartition(") ->")
    parts = re.split(r", (?=\*|\w+(?::|=))", arguments)
    return f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f") ->{returned}"


def _read_docstring(found: Any) -> str:
    return found.docstring.value if found.docstring else ""
