"""Arguments that several verbs share, and the run file that they name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.registry import is_script
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.config import RunSpec


def add_run_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN.yaml [section.key=value ...]")
    _add_trust_argument(parser)


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--code", type=Path, metavar="FILE.py", help="your workload's file, if it has moved")
    _add_trust_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser, what: str = "JSON instead of text") -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what}")


def _add_trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="execute the code that a run folder from elsewhere names")


def load_spec(words: Sequence[str], verb: str) -> RunSpec:
    """Load the run file or the script that comes first, with the overrides that follow it."""
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        usage = f"paceline {verb} RUN.yaml [section.key=value ...]"
        raise UserError(f"no run file given; write it as  {usage}", code="missing-value")
    if is_script(words[0]):
        from paceline.script.run import derive_script_spec

        return derive_script_spec(Path(words[0]), words[1:])
    from paceline.config import load

    return load(words[0], words[1:])
