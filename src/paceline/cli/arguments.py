"""The arguments of every verb, and the run file or script that comes first among them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import registry
from paceline.errors import UserError
from paceline.io.safe_yaml import read_data_file

if TYPE_CHECKING:
    from paceline.config import RunSpec

RUN_FILE = "RUN.yaml [section.key=value ...]"
TYPES = {"int": int, "float": float, "path": Path}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb that the parser's name ends with."""
    verb = parser.prog.rpartition(" ")[2]
    for names, given in read_data_file(Path(__file__).with_name("arguments.yaml"))[verb].items():
        how = {**given, "type": TYPES[given["type"]]} if "type" in given else dict(given)
        if how.keys() == {"help"}:
            how["action"] = "store_true"
        parser.add_argument(*names.split(), **how)


def load_spec(words: Sequence[str], verb: str) -> "RunSpec":
    """Load the run file or the script that comes first, with the overrides that follow it."""
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise UserError(f"no run file given; write it as  paceline {verb} {RUN_FILE}", code="missing-value")
    if registry.is_script(words[0]):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(words[0]), words[1:])
    from paceline.config import load

    return load(words[0], words[1:])
