"""The verb `measure`, and `calibrate --from` a measurement, as commands: words in, tables out."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from paceline.arguments import check_price, make_folder, numbers
from paceline.errors import UserError
from paceline.record.files import write_json
from paceline.record.units import duration
from paceline.spec import RunSpec

MOST_RANKS = 1024


def run(spec: RunSpec, arguments: argparse.Namespace, console: Any) -> int:
    from paceline.measuring.show import show
    from paceline.measuring.sweep import measure

    for name in ("steps", "repeats"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name}: {getattr(arguments, name)} is not possible; use 1 or more")
    if arguments.steps < 4:
        raise UserError(f"--steps: {arguments.steps} leave nothing after the warm-up; use 10 or more")
    price = check_price(arguments.price)
    layouts = [word for word in arguments.layouts.split(",") if word]
    ranks = numbers(arguments.ranks or ("1" if layouts else "1,2"), "--ranks", different=True)
    try:
        found = measure(
            spec,
            [] if "single" in layouts and not arguments.ranks else ranks,
            layouts=layouts,
            weak=arguments.weak,
            repeats=arguments.repeats,
            steps=arguments.steps,
            price=price,
            out=arguments.out,
            retry=arguments.retry,
            say=lambda text: print(text, file=sys.stderr),
        )
    except KeyboardInterrupt:
        print("paceline: stopped, as asked; what is done is kept, and the same command goes on", file=sys.stderr)
        raise
    for part in show(found):
        console.print(part)
    console.print(f"written: {found.file}; a page of it:  paceline report {found.folder} --out report", soft_wrap=True)
    return 0


def run_links(arguments: argparse.Namespace, console: Any) -> int:
    from paceline.launch.environment import detect
    from paceline.measuring.links import links_to_json, measure_links
    from paceline.measuring.show import links_table

    ranks = numbers(arguments.ranks or "2", "--ranks", different=True)
    if len(ranks) > 1 or not 2 <= ranks[0] <= MOST_RANKS:
        raise UserError(f"--links --ranks {arguments.ranks}: give one number, 2 or more, as in  --links --ranks 2")
    place = detect(os.environ)
    if place is not None and place.world == 1:
        raise UserError("--links: a link needs two ranks, and the launcher started one")
    found = measure_links(ranks[0])
    if place is not None and place.rank > 0:
        return 0
    console.print(links_table(found))
    best = max((link for link in found if link.of_all_ranks), key=lambda link: link.bandwidth_bits_s)
    console.print(f"a link carries {best.rate}: the most that a collective reached ({best.name})")
    if arguments.out is not None:
        make_folder(arguments.out)
        write_json(arguments.out / "links.json", links_to_json(found))
        console.print(f"written: {arguments.out / 'links.json'}")
    return 0


def run_recalibrate(arguments: argparse.Namespace, console: Any) -> int:
    """`calibrate --from`: what a measurement says about the calibration of its machine."""
    from paceline.measuring.recalibrate import recalibrate
    from paceline.planning.calibrating.calibration import usual_file, written

    file = arguments.out or usual_file()
    correction, rows = recalibrate(arguments.measured, file)
    for row in rows:
        before, after = duration(row.before_s), duration(row.after_s)
        console.print(f"{row.label}: {duration(row.step_s)} per step; planned {before} before, {after} now")
    console.print(correction.words(), soft_wrap=True)
    console.print(written(file), soft_wrap=True)
    return 0
