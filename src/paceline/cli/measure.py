"""The commands `measure` and `check`."""

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cli.arguments import load_spec
from paceline.io.arguments import check_output_file, check_price, make_output_folder, option_error, parse_numbers
from paceline.io.files import print_json, write_json
from paceline.io.format import duration, plural, wrap_lines
from paceline.io.terminal import build_console, print_text, warn
from paceline.launch.environment import detect_rank
from paceline.measurement.links import dump_links, measure_links
from paceline.measurement.result import Measurement
from paceline.measurement.tables import build_links_table, build_measurement_tables, build_summary_table
from paceline.planner.links import links_file, store_measured_link
from paceline.runlog.machine import list_gpu_names
from paceline.trials.check import build_parity_table, check

MOST_RANKS = 1024


def run_measure(args: Namespace) -> int:
    if args.links:
        return run_measure_links(args)
    options = _check_options(args)
    if args.baseline is not None:
        return _run_gate(args, options)
    try:
        found = _measure(args, options)
    except KeyboardInterrupt:
        warn("paceline: stopped; finished runs are kept, and the same command resumes")
        raise
    if args.json:
        print_json({"name": found.name, "folder": found.folder, **found.to_json()})
        return 0
    console = build_console()
    for part in render_measurement(found, args.verbose):
        console.print(part)
    console.print(f"written: {found.file}; all tables: -v; a page:  paceline report {found.folder}", soft_wrap=True)
    return 0


def _run_gate(args: Namespace, options: dict[str, Any]) -> int:
    """Write a baseline, or compare new runs with it; they are kept only with `--out`."""
    from paceline.measurement import baseline as gate

    file = args.baseline
    check_output_file(file, "--baseline")
    before = gate.read_baseline(file) if file.exists() else None
    if args.out is not None and (args.out / "measure.json").exists():
        raise option_error("--out", f"{args.out} holds older runs; give a new folder, or leave it out", "conflict")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        now = gate.build_baseline(_measure(args, {**options, "out": args.out or Path(folder)}))
    if before is None:
        write_json(file, asdict(now))
        print_text(f"written: {file}; the same command compares with it")
        return 0
    found = gate.compare_with_baseline(file, before, now)
    if args.json:
        print_json({"regressions": [asdict(one) for one in found], "before": asdict(before), "now": asdict(now)})
    else:
        for line in gate.describe_comparison(file, found, before, now):
            print_text(line)
    return 1 if found else 0


def _measure(args: Namespace, options: dict[str, Any]) -> Measurement:
    if args.command:
        return _measure_command(args, options)
    from paceline.measurement.measure import measure

    spec = load_spec(args.words, "measure")
    layouts = [word for word in args.layouts.split(",") if word]
    alone = "single" in layouts and not args.ranks
    ranks = parse_numbers(args.ranks or ("1" if layouts else "1,2"), "--ranks", different=True)
    return measure(spec, [] if alone else ranks, layouts=layouts, weak=args.weak, **options)


def _measure_command(args: Namespace, options: dict[str, Any]) -> Measurement:
    from paceline.measurement.scripts.measure_command import measure_command

    for option in ("layouts", "weak"):
        if getattr(args, option):
            raise option_error(f"--{option}", "the script of a command decides its layout; leave it out", "conflict")
    if args.words:
        raise option_error(args.words[0], "a command needs no run file; give one of them", "conflict")
    ranks = parse_numbers(args.ranks or "1,2", "--ranks", different=True)
    return measure_command(args.command, ranks, **options)


def _check_options(args: Namespace) -> dict[str, Any]:
    """Return the options that run files and commands share, or raise UserError."""
    for name, least in (("steps", 4), ("repeats", 1)):
        if getattr(args, name) < least:
            raise option_error(f"--{name}", f"{getattr(args, name)} is too few; use {least} or more")
    given = {name: getattr(args, name) for name in ("repeats", "steps", "out", "retry")}
    return {**given, "price": check_price(args.price), "log": warn}


def run_measure_links(args: Namespace) -> int:
    gpus = len(list_gpu_names())
    ranks = parse_numbers(getattr(args, "ranks", "") or str(max(2, gpus)), "--ranks", different=True)
    if len(ranks) > 1 or not 2 <= ranks[0] <= MOST_RANKS:
        raise option_error("--ranks", "a link needs one number, 2 or more, as in  --links --ranks 2")
    place = detect_rank(os.environ)
    if place is not None and place.world == 1:
        raise option_error("--links", "a link needs two ranks, and the launcher started one")
    found = measure_links(ranks[0])
    if place is not None and place.rank > 0:
        return 0
    best = max((link for link in found if link.of_all_ranks), key=lambda link: link.bandwidth_bits_s)
    nodes = place.world // place.local_world if place is not None else 1
    ring = next(link for link in found if link.of_all_ranks and link.collective == "all_reduce")
    stored = store_measured_link(ring.bandwidth_bits_s / 8, ring.ranks, nodes, on_gpu=gpus >= ring.ranks // nodes)
    if args.json:
        print_json(dump_links(found))
    else:
        console = build_console()
        console.print(build_links_table(found))
        console.print(f"a link carries {best.rate}: the most that a collective reached ({best.name})")
        console.print(f"stored for plans with {stored.device}: {links_file()}", soft_wrap=True)
    if args.verb == "measure" and args.out is not None:
        make_output_folder(args.out)
        write_json(args.out / "links.json", dump_links(found))
        warn(f"written: {args.out / 'links.json'}")
    return 0


def run_recalibrate(args: Namespace) -> int:
    """`calibrate --from`: correct a calibration by a measurement on its machine."""
    console = build_console()
    from paceline.measurement.recalibration import update_calibration
    from paceline.planner.calibration.calibration import default_calibration_path, describe_calibration_file

    file = args.out or default_calibration_path()
    correction, rows = update_calibration(args.measured, file)
    if args.json:
        print_json({"rows": [asdict(row) for row in rows], "correction": correction.describe(), "file": file})
        return 0
    for row in rows:
        before, after = duration(row.before_s), duration(row.after_s)
        console.print(f"{row.label}: {duration(row.step_s)} per step; planned {before} before, {after} now")
    console.print(correction.describe(), soft_wrap=True)
    console.print(describe_calibration_file(file), soft_wrap=True)
    return 0


def render_measurement(found: Measurement, verbose: bool = False) -> Iterator[Any]:
    """Yield what rich is to print: the verdict and one table, or with `verbose` all of them."""
    measured = found.measured
    for line in found.verdict:
        yield from wrap_lines(line, "")
    yield from ("", build_summary_table(found))
    batch = "the batch grows with the ranks" if found.kind == "weak" else "the same batch on all rows"
    if any(row.fits for row in measured):
        batch = "each step a pass over all samples"
    elif not all(row.batch.global_batch for row in measured):
        batch = "if each rank has its own batch"
    repeats = max((row.repeats for row in measured), default=0)
    scaling = f"{found.kind} scaling, {batch}" if len(measured) > 1 else "one row"
    yield f"{found.name}: {scaling}; {found.steps} steps, {plural(repeats, 'repeat')}, medians"
    for note in found.notes:
        yield from wrap_lines(note, "! ")
    if not verbose:
        return
    for table in build_measurement_tables(found):
        yield from ("", table.title, table, *wrap_lines(table.note, "  "))
    yield ""
    for finding in found.findings:
        yield from wrap_lines(finding.text + (f". To change it: {finding.advice}" if finding.advice else ""), "→ ")


def run_check(args: Namespace) -> int:
    spec = load_spec(args.words, "check")
    numbers = {n: parse_numbers(getattr(args, n), f"--{n}", different=True) for n in ("ranks", "accumulate")}
    if args.steps < 1:
        raise option_error("--steps", f"{args.steps} is not a number of steps; use 1 or more")
    layouts = [word for word in args.layouts.split(",") if word]
    parity = check(spec, **numbers, steps=args.steps, layouts=layouts, out=args.out, log=warn)
    if not parity.rows:
        return 0
    if args.json:
        held = {name: getattr(parity, name) for name in ("holds", "tolerance", "steps", "causes", "in_fp64", "no_fp64")}
        print_json({**held, "rows": parity.table()})
    elif parity.holds:
        within = f"within {parity.tolerance:g} over {parity.steps} steps ({spec.train.precision})"
        print_text(f"the answer is the same {within}{parity.verdict}")
    if not parity.holds:
        worst = next(r for r in parity.rows if not (r.agrees(parity.tolerance) or parity.is_rounding(r)))
        by = f"{worst.name} differs from the reference by more than {parity.tolerance:g}, most in {worst.worst.where}"
        warn(f"paceline: the answer depends on the layout: {by}{parity.verdict}")
        for cause in parity.causes:
            warn(f"  cause: {cause}")
    if not args.json:
        build_console().print(build_parity_table(parity))
    return 0 if parity.holds else 1
