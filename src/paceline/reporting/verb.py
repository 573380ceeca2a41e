"""The verb `report` as a command."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from paceline.errors import UserError


def run(arguments: argparse.Namespace, console: Any) -> int:
    from paceline.measuring.show import wrapped
    from paceline.reporting.report import report

    price = arguments.price
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UserError(f"--price {price:g} is not an amount of USD per device and hour; use 0 or more")
    found = report(arguments.inputs, arguments.out, title=arguments.title, price=price)
    for note in found.contents.left_out:
        print(f"paceline: {note}", file=sys.stderr)
    for line in found.contents.verdict:
        for part in wrapped(line, ""):
            console.print(part)
    console.print(f"written: {found.page}, report.md, report.tex, figures/", soft_wrap=True)
    return 0
