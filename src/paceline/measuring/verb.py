"""The verb `measure` as a command: words in, tables out."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.parity import numbers
from paceline.record.files import write_json
from paceline.record.units import number
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
    price = arguments.price
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UserError(f"--price {price:g} is not an amount of USD per device and hour; use 0 or more")
    layouts = [word for word in arguments.layouts.split(",") if word]
    ranks = numbers(arguments.ranks or ("1" if layouts else "1,2"), "--ranks")
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
    from paceline.measuring.links import as_json, measure_links
    from paceline.measuring.show import links_table

    ranks = numbers(arguments.ranks or "2", "--ranks")
    if len(ranks) > 1 or not 2 <= ranks[0] <= MOST_RANKS:
        raise UserError(f"--links --ranks {arguments.ranks}: give one number, 2 or more, as in  --links --ranks 2")
    place = detect(os.environ)
    if place is not None and place.world == 1:
        raise UserError("--links: a link needs two ranks, and the launcher started one")
    found = measure_links(ranks[0])
    if place is not None and place.rank > 0:
        return 0
    console.print(links_table(found))
    best = max((link for link in found if link.between == "all ranks"), key=lambda link: link.bandwidth_bits_s)
    console.print(
        f"a link carries {number(best.bandwidth_bits_s / 1e9, 3)} Gbit/s: the most that a collective reached "
        f"({best.collective.replace('_', '-')})"
    )
    if arguments.out is not None:
        _make(arguments.out)
        write_json(arguments.out / "links.json", as_json(found))
        console.print(f"written: {arguments.out / 'links.json'}")
    return 0


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be a folder: {error.strerror}") from None
