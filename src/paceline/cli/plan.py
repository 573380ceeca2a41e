"""The commands `plan` and `calibrate`: arguments, tables and JSON."""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import load_spec
from paceline.config import registry
from paceline.errors import UserError
from paceline.io.arguments import check_output_file, make_output_folder, option_error, parse_hours, parse_numbers
from paceline.io.files import print_json, read_json, write_atomic, write_json
from paceline.io.terminal import build_console, print_file, print_text, warn

if TYPE_CHECKING:
    from paceline.config import RunSpec
    from paceline.planner.plan import Plan


PAGE_OPTIONS = "samples tokens mtbf restart price spot_price budget min_efficiency calibration hf lora"
HF_WORKLOAD = "transformers"


def build_hf_spec(args: Namespace) -> "RunSpec | None":
    """Build the run that `--hf` describes instead of a run file; None without it."""
    if args.hf is None:
        if args.lora is not None:
            raise option_error("--lora", "it needs --hf; with a run file, type  model.lora_rank=…", "missing-value")
        return None
    if files := [word for word in args.words if "=" not in word]:
        raise option_error("--hf", f"it replaces a run file, and {files[0]!r} was given too; leave one out", "conflict")
    if args.emit:
        raise option_error("--emit", "launch files start a run file, not --hf; write one with these", "conflict")
    from paceline.config import COMMAND_LINE, build_spec, parse_overrides
    from paceline.config.run_file import set_nested

    options = {"model.config": args.hf, "model.lora_rank": args.lora}
    typed = {**parse_overrides(args.words), **{key: value for key, value in options.items() if value is not None}}
    suggested = registry.import_object(registry.find_entry(HF_WORKLOAD).plan_defaults)(args.hf)
    values: dict[str, Any] = {"name": HF_WORKLOAD, "workload": HF_WORKLOAD}
    for key, value in {**suggested, **typed}.items():
        set_nested(values, key, value)
    return build_spec(values, {**dict.fromkeys(suggested, args.hf), **dict.fromkeys(typed, COMMAND_LINE)})


def run_plan(args: Namespace) -> int:
    """Print the plan, or compare clusters; write --page, --out and --emit files; return 1 if nothing fits."""
    from paceline.planner.compare import Comparison
    from paceline.planner.target import resolve_target

    spec = build_hf_spec(args) or load_spec(args.words, "plan")
    if args.queue:
        from paceline.cli.jobs import print_queue

        return print_queue(spec, {}, args.site, args.words, args.json)
    if args.site is not None:
        raise option_error("--site", "it is for --queue; leave it out, or add --queue", "conflict")
    ask, clusters = _build_planner(args), args.cluster or [spec.cluster]
    counts = parse_numbers(args.devices, "--devices") if args.devices else []
    if len(clusters) > 1 and counts:
        raise option_error("--devices", "several clusters are compared as they are; write  4xH100", "conflict")
    for option, file in (("--page", args.page), ("--trace", args.trace)):
        if file is not None:
            check_output_file(file, option)
    plans = [ask(spec, counts if len(clusters) == 1 else [resolve_target(name).devices], name) for name in clusters]
    comparison = Comparison(tuple(plans)) if len(plans) > 1 else None
    found = comparison.chosen.plan if comparison and comparison.chosen else plans[0]
    if args.page is not None:
        from paceline.planner.page.page import render_plan_page

        warn(f"planning every setting of {args.page}")
        shown = [ask(spec, [], name) for name in clusters] if comparison else plans
        write_atomic(args.page, render_plan_page(shown, ask, _page_command(args)))
    if args.trace is not None:
        write_json(args.trace, found.as_trace())
    files: dict[str, str] = {}
    if args.emit:
        from paceline.planner.emit import build_launch_files

        run_file = Path(args.words[0] if args.words else "")
        files = build_launch_files(found, run_file, args.emit, args.words[1:])
    from paceline.planner.rows import find_failed_claims

    failed = list(find_failed_claims(found, args.claims or ()))
    result = comparison or found
    if args.out is not None:
        make_output_folder(args.out)
        write_json(args.out / "plan.json", result.as_json())
        for name, text in files.items():
            write_atomic(args.out / name, text)
    if args.json:
        print_json(result.as_json())
    elif files and args.out is None:
        for name, text in files.items():
            print_file(f"# ── {name}\n{text}" if len(files) > 1 else text)
    else:
        from paceline.planner.show import render_plan

        console = build_console()
        for part in comparison.render() if comparison else render_plan(found, args.verbose):
            console.print(part)
        if args.out is not None:
            print_text("written: " + ", ".join(str(args.out / name) for name in ("plan.json", *files)))
        for file in filter(None, (args.page, args.trace)):
            print_text(f"written: {file}")
    for claim in failed:
        warn(f"paceline: does not hold: {claim}")
    return 0 if found.fits and not failed else 1


def _build_planner(args: Namespace) -> "Callable[[RunSpec, Sequence[int], str], Plan]":
    """Return a function that plans a spec on numbers of devices of a cluster, as the options ask."""
    from paceline.planner.plan import plan
    from paceline.planner.rows import HourlyRates, Requirements

    deadline = parse_hours(args.deadline, "--deadline") if args.deadline else None
    options: dict[str, Any] = {
        "price": HourlyRates(args.price, args.spot_price, args.spot, args.grid),
        "samples": args.samples,
        "tokens": args.tokens,
        "mtbf_h": args.mtbf,
        "restart_s": 3600 * parse_hours(args.restart, "--restart") if args.restart else None,
        "calibration": args.calibration,
        "requirements": Requirements(deadline, args.budget, args.min_efficiency),
    }
    return lambda spec, devices, cluster: plan(spec, cluster, devices, **options)


def _page_command(args: Namespace) -> list[str]:
    """Return the command that made the plan, which a page adds its settings to."""
    options = {f"--{name.replace('_', '-')}": name for name in PAGE_OPTIONS.split()}
    given = {option: vars(args)[key] for option, key in options.items()}
    words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return ["paceline", "plan", *args.words, *words, *["--spot"] * args.spot]


def _is_calibration(path: Path) -> bool:
    try:
        return "measured" in read_json(path)
    except UserError:
        return False


def _calibrate_run(args: Namespace, ranks: list[int]) -> int:
    """Time the run's own steps on this machine, and correct the calibration by them."""
    from paceline.cli.measure import run_recalibrate
    from paceline.measurement.measure import measure

    spec, cores = load_spec(args.words, "calibrate"), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        args.measured = Path(folder) / f"{spec.name}-calibrate"
        measure(spec, [n for n in ranks if n <= cores], repeats=2, steps=20, out=args.measured, log=warn)
        return run_recalibrate(args)


def run_calibrate(args: Namespace) -> int:
    if args.measured is not None:
        from paceline.cli.measure import run_recalibrate

        return run_recalibrate(args)
    from torch import cuda

    from paceline.planner.calibration.calibrate import calibrate_machine
    from paceline.planner.calibration.calibration import default_calibration_path, describe_calibration_file

    ranks = parse_numbers(args.ranks, "--ranks")
    if min(ranks) < 1 or max(ranks) > 64:
        raise option_error("--ranks", f"{args.ranks} is not possible here; give numbers from 1 to 64")
    path = args.out or default_calibration_path()
    if args.out is not None and path.is_file() and not _is_calibration(path):
        problem = f"{path} exists and is not a calibration; name another file, or remove it"
        raise option_error("--out", problem, "conflict")
    path.parent.mkdir(parents=True, exist_ok=True)
    if args.threads < 0:
        problem = f"{args.threads} is not possible; give 1 or more, or 0 to share the cores"
        raise option_error("--threads", problem)
    if not (args.words and path.is_file()):
        found = calibrate_machine(sorted(set(ranks)), warn, args.threads)
        if cuda.is_available():  # after the ranks: they are forked from this process
            from paceline.planner.calibration.gpu_probes import measure_gpu

            found["gpu"] = measure_gpu(warn)
        write_json(path, found)
    if args.words:
        return _calibrate_run(args, ranks)
    if args.json:
        print_json(found)
        return 0
    print_text(describe_calibration_file(path))
    return 0
