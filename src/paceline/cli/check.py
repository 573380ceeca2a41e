"""The verb `check` as a command: a table that proves the answer the same, or names what differs most."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.io.arguments import parse_numbers
from paceline.io.files import print_json
from paceline.io.terminal import print_text, warn
from paceline.trials.check import Parity, build_parity_table, check


def run_check(spec: RunSpec, arguments: argparse.Namespace, console: Any) -> int:
    ranks, accumulate = (
        parse_numbers(getattr(arguments, name), f"--{name}", different=True) for name in ("ranks", "accumulate")
    )
    if arguments.steps < 1:
        raise UserError(f"--steps: {arguments.steps} is not a number of steps; use 1 or more")
    layouts = [word for word in arguments.layouts.split(",") if word]
    parity = check(spec, ranks, accumulate, arguments.steps, layouts=layouts, out=arguments.out, say=warn)
    if not parity.rows:
        return 0
    if arguments.json:
        held = {"holds": parity.holds, "tolerance": parity.tolerance, "steps": parity.steps}
        print_json({**held, "rows": parity.table(), "causes": parity.causes})
    else:
        console.print(build_parity_table(parity))
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
