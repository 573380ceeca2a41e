"""The verb `sweep` as a command: trials in, a table, sweep.json, sweep.csv and a page out."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, cast

from paceline.api import train
from paceline.cli.arguments import load_spec
from paceline.io.arguments import make_output_folder, option_error
from paceline.io.files import print_json
from paceline.io.terminal import build_console, print_text, warn
from paceline.reports.sweep_page import PAGE, build_sweep_table, describe_sweep, sweep, write_sweep_page
from paceline.trials.sweep import Sweep, SweepOptions, SweepPlan, build_sweep_plan, format_values, open_sweep

SHOWN = 30


def run_sweep(args: Namespace) -> int:
    words = args.words
    spec, choices = load_spec(words[:1], "sweep"), _parse_options(args)
    if args.trial is not None or args.show:
        plan = build_sweep_plan(spec, words[1:], args.out, choices)
        if args.trial is not None:
            return _run_one_trial(plan, args.trial)
        if not plan.folder.is_dir():
            raise option_error("--show", f"{plan.folder} does not exist; train the sweep without --show", "not-found")
        found = open_sweep(plan)
        write_sweep_page(found)
    else:
        found = sweep(spec, words[1:], out=args.out, log=warn, **choices)
    if args.json:
        print_json(found.to_json())
    else:
        print_sweep(found, words, build_console())
    return 0


def _parse_options(args: Namespace) -> SweepOptions:
    if args.random and args.optuna:
        raise option_error("--optuna", "--random draws trials too; leave one out", "conflict")
    given = {name: getattr(args, name) for name in ("trials", "halving", "jobs", "score", "seed", "retry")}
    given["search"] = "optuna" if args.optuna else "random" if args.random else "grid"
    found: Any = {name: value for name, value in given.items() if value is not None}
    return cast(SweepOptions, found)


def _run_one_trial(plan: SweepPlan, number: int) -> int:
    """Run one trial, as a job of an array: it writes its own run folder, and the next `sweep` finds it there."""
    if plan.halving or plan.search == "optuna":
        kind = "--halving" if plan.halving else "--optuna"
        raise option_error("--trial", f"with {kind} trials depend on those before; leave one out", "conflict")
    if not 1 <= number <= plan.trials:
        raise option_error("--trial", f"{number} is not one of the {plan.trials} trials")
    make_output_folder(plan.folder)
    begun = open_sweep(plan)
    row = begun.trials[number - 1]
    print_text(f"trial {number} of {plan.trials}: {format_values(row, begun.keys)}")
    result = train(plan.spec_of(row, plan.lengths[-1]), plan.folder, resume_or_start=True)
    return 0 if result.status in ("finished", "stopped") else 1


def print_sweep(found: Sweep, words: Sequence[str], console: Any) -> None:
    console.print(describe_sweep(found), soft_wrap=True)
    if found.best is not None:
        same = [word for word in words if word.partition("=")[0] not in found.keys]
        command = shlex.join(["paceline", "train", *same, *format_values(found.best, found.keys).split()])
        console.print(f"its run: {found.folder / found.best.run}; to train it alone:  {command}", soft_wrap=True)
    console.print(build_sweep_table(found, SHOWN))
    if len(found.trials) > SHOWN:
        console.print(f"and {len(found.trials) - SHOWN:,} more in {found.folder / 'sweep.csv'}")
    console.print(f"written: {found.folder / PAGE}, sweep.json, sweep.csv", soft_wrap=True)
