"""The commands `report` and `watch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import add_json_argument
from paceline.io.arguments import check_price
from paceline.io.files import print_json
from paceline.io.format import wrap_lines
from paceline.io.terminal import build_console, warn


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", type=Path, metavar="RUN_FOLDER|MEASURE_FOLDER|TIMES.csv")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help="where to (report)")
    parser.add_argument("--title", default="", metavar="TEXT", help="of the page")
    parser.add_argument("--price", type=float, metavar="USD", help="per device and hour")
    add_json_argument(parser)


def run_report(arguments: argparse.Namespace) -> int:
    from paceline.reports.report import report

    found = report(arguments.inputs, arguments.out, title=arguments.title, price=check_price(arguments.price))
    for note in found.contents.left_out:
        warn(f"paceline: {note}")
    if arguments.json:
        print_json({"page": found.page, "verdict": found.contents.verdict, "table": found.table()})
        return 0
    console = build_console()
    for line in found.contents.verdict:
        for part in wrap_lines(line, ""):
            console.print(part)
    console.print(f"written: {found.page}, report.md, report.tex, figures/, tables/", soft_wrap=True)
    return 0


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER|JOB")
    parser.add_argument("--once", action="store_true", help="print the present state and exit")
    add_json_argument(parser)


def run_watch(arguments: argparse.Namespace) -> int:
    from paceline.reports.watch import watch
    from paceline.slurm.jobs import find_run

    return watch(find_run(arguments.run).path, once=arguments.once, as_json=arguments.json)
