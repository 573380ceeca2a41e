"""The command `paceline adopt`: files of other tools in, a table and a run file out."""

import shlex
from argparse import Namespace

from paceline.convert.adopt import Adopted, adopt
from paceline.convert.draft import ConvertedKey
from paceline.io.arguments import option_error
from paceline.io.escape import to_one_line
from paceline.io.files import print_json
from paceline.io.format import plural
from paceline.io.table import Table
from paceline.io.terminal import build_console

MAX_VALUE_CHARS = 40


def run_adopt(args: Namespace) -> int:
    console = build_console()
    if args.line and args.command:
        raise option_error("--command", "another command is given after --; leave one of them out", "conflict")
    command = args.line or shlex.join(args.command)
    adopted = adopt(args.files, command=command, out=args.out, force=args.force)
    if args.json:
        print_json(adopted.as_json())
        return 0
    console.print(build_adopt_table(adopted))
    for line in summarize_adopted(adopted):
        console.print(to_one_line(line), soft_wrap=True)
    return 0


def build_adopt_table(adopted: Adopted) -> Table:
    shown = Table("key", "value", "became", "in the run file", left=4)
    source = ""
    for row in adopted.rows:
        if row.source != source:
            source = row.source
            shown.add_row(f"{to_one_line(source)}:", "", "", "")
        place = ": ".join(part for part in (", ".join(row.run_keys), row.reason) if part)
        cells = (f"  {row.key}", _format_value(row), row.outcome.value, place)
        shown.add_row(*map(to_one_line, cells))
    return shown


def summarize_adopted(adopted: Adopted) -> list[str]:
    """Return the lines below the table: counts, and what is left to do."""
    given = sum(row.given for row in adopted.rows)
    counts = ", ".join(f"{count} {name}" for name, count in adopted.counts().items())
    lines = ["", f"{plural(given, 'key')}: {counts}"]
    review = [row for row in adopted.rows if row.review]
    lines += [f"look at: {row.source}: {row.key} {_format_value(row)}: {row.reason}" for row in review]
    lines += [f"to fill in: {key}: {reason}" for key, reason in adopted.fill_in.items()]
    if adopted.out is not None:
        lines.append(f"written: {adopted.out}; look at it with  paceline explain {adopted.out}")
    if adopted.site_out is not None:
        submit = f"paceline submit {adopted.out} --site {adopted.site_out}"
        lines.append(f"written: {adopted.site_out}, what the job script asks of its cluster; submit with  {submit}")
    return lines


def _format_value(row: ConvertedKey) -> str:
    value = "" if row.value is None else str(row.value).lower() if isinstance(row.value, bool) else str(row.value)
    value = value if len(value) <= MAX_VALUE_CHARS else f"{value[: MAX_VALUE_CHARS - 1]}…"
    return value if row.given else f"({value or 'not given'})"
