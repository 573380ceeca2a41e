"""The verb `report` as a command."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paceline.arguments import check_price


def run(arguments: argparse.Namespace, console: Any) -> int:
    from paceline.record.units import wrapped
    from paceline.reporting.report import report

    found = report(arguments.inputs, arguments.out, title=arguments.title, price=check_price(arguments.price))
    for note in found.contents.left_out:
        print(f"paceline: {note}", file=sys.stderr)
    for line in found.contents.verdict:
        for part in wrapped(line, ""):
            console.print(part)
    console.print(f"written: {found.page}, report.md, report.tex, figures/", soft_wrap=True)
    return 0
