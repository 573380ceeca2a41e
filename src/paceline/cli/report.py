"""The commands `report`, `watch` and `runs`."""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.io.arguments import check_price
from paceline.io.files import print_json, to_flat
from paceline.io.format import wrap_lines
from paceline.io.terminal import build_console, print_text, warn
from paceline.reports.report import RunRow, build_experiments_table, build_runs_table
from paceline.reports.run_view import Experiments, compare_experiments, describe_other_keys, read_run_view
from paceline.runlog.run_dir import RunDir, find_runs
from paceline.runlog.summary import read_summary

MAX_DRAWN = 500  # runs; more are listed in plain lines, which are printed at once


def run_report(args: Namespace) -> int:
    from paceline.reports.report import report

    options = {name: getattr(args, name) for name in ("title", "warmup", "only")}
    found = report(args.inputs, args.out, price=check_price(args.price), **options)
    for note in found.contents.left_out:
        warn(f"paceline: {note}")
    if args.json:
        print_json({"page": found.page, "verdict": found.contents.verdict, "table": found.table()})
        return 0
    console = build_console()
    console.print(*(line for text in found.contents.verdict for line in wrap_lines(text, "")), sep="\n")
    if found.contents.command:
        console.print(found.contents.command, soft_wrap=True)
    console.print(f"written: {found.page}, report.md, report.tex, figures/, tables/", soft_wrap=True)
    return 0


def run_watch(args: Namespace) -> int:
    from paceline.reports.watch import watch
    from paceline.slurm.jobs import find_run

    shown = {"page": args.page, "serve": args.serve}
    return watch(find_run(args.run).path, once=args.once, as_json=args.json, **shown)


def list_runs(folder: Path) -> list[RunRow]:
    """Read the runs of a folder, or the run that it is; those that cannot be read have a problem."""
    found: list[RunRow] = []
    if folder.is_dir():
        for run in [RunDir(folder)] if (folder / "spec.yaml").is_file() else find_runs(folder):
            try:
                summary = read_summary(run.summary_file) if run.summary_file.is_file() else None
                status, workload = summary.status if summary else "not finished", run.recorded_workload()
                found.append(RunRow(run.name, status, summary, path=run.path, workload=workload))
            except UserError as error:
                problem = " ".join(str(error).split())
                found.append(RunRow(run.name, "cannot be read", None, path=run.path, workload="?", problem=problem))
    if not found:
        missing = "has no runs" if folder.is_dir() else "does not exist"
        message = f"{folder} {missing}; name the folder of  paceline train, as in  paceline runs runs"
        raise UserError(message, code="not-found", key=str(folder))
    return found


def _dump_run(row: RunRow) -> dict[str, Any]:
    facts = {"path": str(row.path), "name": row.name, "workload": row.workload, "status": row.problem or row.status}
    ended = to_flat(row.summary) if row.summary else {"metrics": {}}
    names = ("ranks", "steps", "samples", "seconds", "loss_last", "metrics", "best")
    return {**facts, **{name: ended.get(name) for name in names}}


def run_runs(args: Namespace) -> int:
    console = build_console()
    folders = args.folders or [Path("runs")]
    found = [row for folder in folders for row in list_runs(folder)]
    compare = args.compare or (len(folders) > 1 and all((f / "spec.yaml").is_file() for f in folders))
    if compare and len(found) > 1:
        views = [read_run_view(row.path) for row in found if row.summary is not None]
        if len(views) < 2:
            raise UserError(f"{len(views)} of these runs ended, and a comparison needs two", code="invalid-request")
        return _print_comparison(compare_experiments(views), args.json, console)
    if args.json:
        print_json([_dump_run(row) for row in found])
        return 0
    workloads = [row.workload.rpartition("/")[2] for row in found]
    table = build_runs_table(found, {"workload": workloads} if len(set(workloads)) > 1 else {})
    if len(found) > MAX_DRAWN:
        print_text("\n".join(table.to_lines()))
    else:
        console.print(table)
    for row in found:
        if row.problem:
            warn(f"paceline: {row.path}: {row.problem}")
    return 0


def _print_comparison(found: Experiments, as_json: bool, console: Any) -> int:
    if as_json:
        changed = (dict(zip(found.keys, values, strict=True)) for values in found.values)
        rows = zip(found.runs, found.scores, changed, strict=True)
        print_json([{"run": str(run.path), "score": score and asdict(score), "changed": by} for run, score, by in rows])
        return 0
    head = (line for text in (found.text, found.caution) for line in wrap_lines(text, ""))
    console.print(*head, build_experiments_table(found), *wrap_lines(describe_other_keys(found), ""), sep="\n")
    return 0
