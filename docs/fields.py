"""Writes the tables of docs/train.md from the run file's own description of its fields.

    python docs/fields.py

The tables stand between `<!-- fields SECTION -->` and `<!-- end -->`; everything else on the page is left alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from paceline.cli.keys import Key, iter_keys
from paceline.config import Parallel, RunSpec, Train, registry

PAGE = Path(__file__).with_name("train.md")
SECTIONS: dict[str, type[BaseModel]] = {"run": RunSpec, "train": Train, "parallel": Parallel} | {
    f"{workload}_{name}": section
    for workload in registry.BUILT_IN
    for name, section in registry.find_entry(workload).sections().items()
}
HEAD = "\n| key | default | unit | allowed | meaning |\n|---|---|---|---|---|\n"


def row(key: Key) -> str:
    default = f"`{key.default}`" if key.default else "none"
    allowed = ", ".join((*(f"`{word}`" for word in key.words), *filter(None, [key.limits])))
    return f"| `{key.name}` | {default} | {key.unit} | {allowed} | {key.meaning} |"


def page(text: str) -> str:
    """The page with its tables written anew."""

    def table(found: re.Match[str]) -> str:
        prefix = "" if found[2] == "run" else found[2].rpartition("_")[2]
        return f"{found[1]}\n{HEAD}" + "\n".join(map(row, iter_keys(SECTIONS[found[2]], prefix))) + "\n\n<!-- end -->"

    return re.sub(r"(<!-- fields (\w+) -->).*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
