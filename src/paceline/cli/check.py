"""The verb `check` as a command: a table that proves the answer the same, or names what differs most."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import add_json_argument, add_run_file_arguments, load_spec
from paceline.errors import UserError
from paceline.io.arguments import parse_numbers
from paceline.io.files import print_json
from paceline.io.terminal import build_console, print_text, warn
from paceline.trials.check import Parity, build_parity_table, check


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file_arguments(parser)
    parser.add_argument("--ranks", default="1,2", metavar="1,2,4", help="numbers of ranks; the first is the reference")
    parser.add_argument("--layouts", default="", metavar="single,fsdp:2,tensor:2", help="layouts, instead of --ranks")
    parser.add_argument("--accumulate", default="1", metavar="1,4", help="passes per step")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps to train (20)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the runs there")
    add_json_argument(parser)


def run_check(arguments: argparse.Namespace) -> int:
    spec = load_spec(arguments.words, "check")
    ranks, accumulate = (
        parse_numbers(getattr(arguments, name), f"--{name}", different=True) for name in ("ranks", "accumulate")
    )
    if arguments.steps < 1:
        raise UserError(f"--steps: {arguments.steps} is not a number of steps; use 1 or more")
    layouts = [word for word in arguments.layouts.split(",") if word]
    parity = check(spec, ranks, accumulate, arguments.steps, layouts=layouts, out=arguments.out, log=warn)
    if not parity.rows:
        return 0
    if arguments.json:
        held = {"holds": parity.holds, "tolerance": parity.tolerance, "steps": parity.steps}
        print_json({**held, "rows": parity.table(), "causes": parity.causes})
    else:
        build_console().print(build_parity_table(parity))
    if not parity.holds:
        _report_difference(parity)
        return 1
    if not arguments.json:
        print_text(
            f"the answer is the same within {parity.tolerance:g} over {parity.steps} steps ({spec.train.precision})"
        )
    return 0


def _report_difference(parity: Parity) -> None:
    worst = next(row for row in parity.rows if not row.agrees(parity.tolerance))
    by = f"{worst.name} differs from the reference by more than {parity.tolerance:g}, most in {worst.worst}"
    warn(f"paceline: the answer depends on the layout: {by}")
    for cause in parity.causes:
        warn(f"  cause: {cause}")
