"""Writes docs/api.md from the docstrings of the public names.

python docs/api.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paceline

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Python

All of this is imported when it is first used, so `import paceline` costs nothing. Wherever a run is asked for, give a
run file, its content as a dict, a `RunSpec` or a `Workload` class. This page is written by `python docs/api.py`.

```python
import paceline

plan = paceline.plan("recipes/classifier_docstrings.yaml", cluster="8xA100")
plan  # one line; a table in a notebook
plan.table()  # rows as dicts, or a DataFrame with frame=True
```
"""


def page() -> str:
    names = [name for name in dir(paceline) if not name.startswith("_")]
    functions = [name for name in names if not inspect.isclass(getattr(paceline, name))]
    classes = [name for name in names if inspect.isclass(getattr(paceline, name))]
    parts = [HEAD, "## Functions\n", *map(_function, functions), "## Classes\n", *map(_class, classes)]
    return "\n".join(parts).rstrip() + "\n"


def _function(name: str) -> str:
    found = getattr(paceline, name)
    return f"### `{name}`\n\n```python\n{_signature(f'paceline.{name}', found)}\n```\n\n{_words(found)}\n"


def _class(name: str) -> str:
    found = getattr(paceline, name)
    members = "\n".join(f"- `{member}`{f': {words}' if words else ''}" for member, words in _members(found))
    return f"### class `{name}`\n\n{_words(found)}\n" + (f"\n{members}\n" if members else "")


def _members(kind: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties that the class, or one of ours that it derives from, has a docstring for."""
    for name, member in inspect.getmembers(kind):
        home = getattr(member, "fget", member)
        ours = str(getattr(home, "__module__", "")).startswith("paceline")
        if name.startswith("_") or not ours or not (inspect.isroutine(member) or isinstance(member, property)):
            continue
        told = inspect.getdoc(member) or ""
        shown = name if isinstance(member, property) else f"{name}({', '.join(_parameters(member))})"
        yield shown, " ".join(told.split("\n\n")[0].split())


def _parameters(member: Any) -> list[str]:
    try:
        return [str(p) for p in inspect.signature(member).parameters if p not in ("self", "cls")]
    except ValueError:
        return []


def _signature(name: str, found: Any) -> str:
    """With the types as they are written; one parameter per line where it is long."""
    signature = inspect.signature(found)
    shown = [_parameter(p) for p in signature.parameters.values()]
    kinds = [p.kind for p in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = re.sub("'", "", inspect.formatannotation(signature.return_annotation))
    line = f"{name}({', '.join(shown)}) -> {returned}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(shown) + f",\n) -> {returned}"


def _parameter(given: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(given.kind, "")
    kind = inspect.formatannotation(given.annotation).replace("'", "")
    if given.default is inspect.Parameter.empty:
        return f"{star}{given.name}: {kind}"
    return f"{given.name}: {kind} = {'...' if callable(given.default) else repr(given.default)}"


def _words(found: Any) -> str:
    return inspect.cleandoc(found.__doc__ or "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
