"""The verb `adopt` as a command: files in, a table and a run file out."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from paceline.convert.adopt import Adopted, adopt
from paceline.convert.draft import ConvertedKey
from paceline.convert.rules import Outcome, is_off
from paceline.errors import UserError
from paceline.io.escape import to_one_line
from paceline.io.files import print_json
from paceline.io.terminal import build_console

LONGEST = 40


def add_adopt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="configurations, job scripts, scripts")
    parser.add_argument(
        "--command", dest="line", default="", metavar="'torchrun …'", help="or after --: what starts it"
    )
    parser.add_argument("--out", type=Path, default=Path("run.yaml"), metavar="RUN.yaml", help="where to (run.yaml)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run_adopt(arguments: argparse.Namespace) -> int:
    console = build_console()
    if arguments.line and arguments.command:
        raise UserError("one command is given with --command and another after --; leave one of them out")
    command = arguments.line or shlex.join(arguments.command)
    adopted = adopt(arguments.files, command=command, out=arguments.out, force=arguments.force)
    if arguments.json:
        print_json(adopted.as_json())
        return 0
    console.print(build_adopt_table(adopted))
    for line in summarize_adopted(adopted):
        console.print(to_one_line(line), soft_wrap=True)
    return 0


def build_adopt_table(adopted: Adopted) -> Any:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("key", "value", "became", "in the run file"):
        shown.add_column(head, overflow="fold")
    source = ""
    for row in adopted.rows:
        if _silent(row):
            continue
        if row.source != source:
            source = row.source
            shown.add_row(f"{to_one_line(source)}:", "", "", "")
        shown.add_row(
            f"  {to_one_line(row.key)}", to_one_line(_value(row)), row.outcome.value, to_one_line(_place(row))
        )
    return shown


def summarize_adopted(adopted: Adopted) -> list[str]:
    """What the table comes to, and what is to be done."""
    given = sum(row.given for row in adopted.rows)
    counts = ", ".join(f"{count} {name}" for name, count in adopted.counts().items())
    silent = [row.key for row in adopted.rows if _silent(row)]
    lines = ["", f"kept, as they ask for nothing: {', '.join(silent)}"] if silent else []
    lines += ["", f"{given} key{'s' * (given != 1)}: {counts}"]
    lines += [f"look at: {row.source}: {row.key} {_value(row)}: {row.why}" for row in adopted.rows if row.ask]
    lines += [f"to fill in: {key}: {why}" for key, why in adopted.fill_in.items()]
    if adopted.out is not None:
        lines.append(f"written: {adopted.out}; look at it with  paceline explain {adopted.out}")
    return lines


def _silent(row: ConvertedKey) -> bool:
    """Asks for nothing, and nothing is done."""
    return row.outcome is Outcome.KEPT and not row.where and is_off(row.value)


def _value(row: ConvertedKey) -> str:
    value = "" if row.value is None else str(row.value).lower() if isinstance(row.value, bool) else str(row.value)
    value = value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"
    return value if row.given else f"({value or 'not given'})"


def _place(row: ConvertedKey) -> str:
    where = ", ".join(row.where)
    return f"{where}: {row.why}" if where and row.why else where or row.why
