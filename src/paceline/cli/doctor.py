"""The command `doctor`: check this machine or several nodes, and print a table or JSON."""

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from paceline.cli.arguments import load_spec
from paceline.diagnostics.nodes import SSH, examine_nodes
from paceline.diagnostics.results import ALL_NODES, CheckContext, CheckResult, Examination, Health
from paceline.io.arguments import option_error
from paceline.io.files import print_json
from paceline.io.format import wrap_lines
from paceline.io.table import Table
from paceline.io.terminal import build_console
from paceline.launch.environment import SINGLE_RANK, detect_rank

STYLES = {Health.LOOK: "yellow", Health.WRONG: "bold red", Health.NOT_HERE: "dim"}


def run_doctor(args: Namespace) -> int:
    if args.links:
        from paceline.cli.measure import run_measure_links

        return run_measure_links(args)
    console = build_console()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns about addresses without names
    rank_info = detect_rank(os.environ) or SINGLE_RANK
    if args.nodes and rank_info is not SINGLE_RANK:
        problem = f"{rank_info.launcher} has started {rank_info.world} ranks already; leave it out"
        raise option_error("--nodes", problem, "conflict")
    if args.nodes:
        found = examine_nodes(args.nodes.split(","), args.words, args.out, args.by or SSH)
    else:
        from paceline.diagnostics.doctor import examine

        spec = load_spec(args.words, "doctor") if args.words else None
        found = examine(CheckContext(args.out, os.environ, spec, rank_info))
    if rank_info.rank and not found.findings:
        return 0  # the first node prints them
    if args.json:
        print_json(found.as_json())
    else:
        for part in render_examination(found):
            console.print(part)
    return 0 if found.healthy else 1


def render_examination(found: Examination) -> Iterator[Any]:
    """Yield a table of the results, and the lines to type below it."""
    table = Table("", "check", "found", "expected", left=4)
    several, topic = len(found.hosts) > 1, ""
    for finding in found.findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_row(topic, "", "", "", style="bold")
        check = f"{finding.check} ({finding.host})" if several and _names_host(finding) else finding.check
        cells = (finding.verdict.value, check, finding.found, finding.expected)
        table.add_row(*cells, style=STYLES.get(finding.verdict, ""))
    yield table
    yield ""
    for verdict in (Health.WRONG, Health.LOOK):
        for finding in found.of(verdict):
            where = f" on {finding.host}" if several and _names_host(finding) else ""
            remedy = f"  →  {finding.remedy}" if finding.remedy else ""
            yield from wrap_lines(f"{finding.check}{where}: {finding.found}{remedy}", f"{verdict.value}: ")
    where = f"{len(found.hosts)} nodes" if several else "this machine"
    wrong, look = len(found.of(Health.WRONG)), len(found.of(Health.LOOK))
    counts = [f"{wrong} wrong"] * bool(wrong) + [f"{look} to look at"] * bool(look)
    yield f"{where}, {len(found.findings)} checks in {found.seconds:.0f} s: {', '.join(counts) or 'all is well'}"


def _names_host(finding: CheckResult) -> bool:
    return finding.host != ALL_NODES and finding.host not in finding.found
