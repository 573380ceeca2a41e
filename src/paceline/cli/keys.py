"""The verb `keys`: what a run file may say, with unit, default, limits and meaning."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.config import registry
from paceline.config.keys import Key, list_keys, list_sections
from paceline.errors import UserError, did_you_mean
from paceline.io.files import print_json
from paceline.io.terminal import build_console

NEAR = 0.75
"""Likeness of a word to a section, from which it is taken for a slip of the hand."""


def add_keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("asked", nargs="*", metavar="SECTION|KEY|WORD", help="train, train.lr, or a word to look for")
    parser.add_argument(
        "--workload", default=registry.DEFAULT_WORKLOAD, metavar="NAME", help="whose model and data (classifier)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run_keys(arguments: argparse.Namespace) -> int:
    console = build_console()
    known = list_keys(arguments.workload)
    exact = [key for key in known if key.name in arguments.asked]
    found = exact or [key for key in known if not arguments.asked or _asked_for(key, arguments.asked)]
    sections = list(list_sections(arguments.workload))
    slips = [word for word in arguments.asked if not exact and _misspelt(word, sections, known)]
    if not found or slips:
        word = (slips or arguments.asked)[0]
        names = sections if slips else [*sections, *(key.name for key in known)]
        hint = did_you_mean(word, names) or f"; the sections are {', '.join(sections)}"
        raise UserError(f"no key of a run file of {arguments.workload} is called {word!r} or speaks of it{hint}")
    if arguments.json:
        print_json([{**asdict(key), "allowed": key.allowed} for key in found])
        return 0
    for key in found:
        console.print(_lines(key), soft_wrap=False)
    if not arguments.asked:
        workloads = ", ".join(registry.BUILT_IN)
        console.print(f"model and data are those of {arguments.workload}; --workload takes {workloads}")
    return 0


def _asked_for(key: Key, words: Sequence[str]) -> bool:
    """A section, a key, or else a word of its name or meaning."""
    for word in words:
        if word == "run" and "." not in key.name:
            return True
        if key.name == word or key.name.startswith(f"{word}.") or key.name.endswith(f".{word}"):
            return True
        if len(word) > 2 and word.lower() in f"{key.name} {key.meaning}".lower() and word not in ("run", "train"):
            return True
    return False


def _misspelt(word: str, sections: Sequence[str], known: Sequence[Key]) -> bool:
    """Whether it looks like a section and is no word of any key."""
    words = {part for key in known for part in re.split(r"\W+|_", f"{key.name} {key.meaning}".lower())}
    return word not in sections and word.lower() not in words and bool(did_you_mean(word, sections, cutoff=NEAR))


def _lines(key: Key) -> Any:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    default = f"  {key.default}" if key.default else "  none"
    head = Text.assemble((key.name, "bold"), default, (f" {key.unit}" if key.unit else "", "dim"))
    allowed = f" ({key.allowed})" if key.allowed else ""
    return Group(head, Padding(Text(f"{key.meaning}{allowed}"), (0, 0, 0, 4)))
