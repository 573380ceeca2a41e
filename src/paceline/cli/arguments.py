"""The arguments of every verb, from arguments.yaml, and the run file or script that comes first among them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import registry
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.config import RunSpec

TYPES = {"path": Path, "int": int, "float": float}
RUN_FILE = "RUN.yaml [section.key=value ...]"


@cache
def _read_arguments() -> dict[str, dict[str, Any]]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it
    found: dict[str, dict[str, Any]] = yaml.load(Path(__file__).with_suffix(".yaml").read_text("utf-8"), loader)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb that the parser's name ends with."""
    verb = parser.prog.rpartition(" ")[2]
    _add_group(parser, _read_arguments()[verb])
    for option, (_, what) in registry.list_plan_options().items() if verb == "plan" else ():
        parser.add_argument(option, dest=what.key, metavar=what.metavar, help=what.help)


def _add_group(parser: Any, group: dict[str, Any]) -> None:
    for names, given in group.items():
        if names == "one of":
            _add_group(parser.add_mutually_exclusive_group(), given)
            continue
        words = {"action": "store_true", "help": given} if isinstance(given, str) else dict(given)
        if kind := TYPES.get(words.get("type", "")):
            words["type"] = kind
        if kind is Path and "default" in words:
            words["default"] = Path(words["default"])
        parser.add_argument(*names.split(), **words)


def load_spec(words: Sequence[str], verb: str, usage: str = RUN_FILE) -> RunSpec:
    """Load the run file or the script that comes first, with the overrides that follow it."""
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise UserError(f"no run file given; write it as  paceline {verb} {usage}", code="missing-value")
    if registry.is_script(words[0]):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(words[0]), words[1:])
    from paceline.config import load

    return load(words[0], words[1:])
