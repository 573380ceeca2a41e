"""The verb `sample` as a command: a run folder and the beginning of a text in, the text out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("prompt", metavar="PROMPT", help='the beginning of a text, such as "Returns the"')
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="most tokens to add (100)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="lower is more cautious (0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="draw from the K likeliest; 0 is all (40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, another text (0)")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")


def run(arguments: argparse.Namespace, console: Any) -> int:
    from paceline.workloads.lm.sample import sample

    given = {name: getattr(arguments, name) for name in ("tokens", "temperature", "top_k", "seed")}
    print(sample(arguments.run, arguments.prompt, **given, which="best" if arguments.best else "newest"))
    return 0
