"""The verbs `plan` and `calibrate` as commands: words in, tables or JSON out."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.planning.plan import plan
from paceline.record.files import as_json, finite, write_json
from paceline.spec import RunSpec

MOST_NUMBERS = 64


def run(spec: RunSpec, run_file: Path, arguments: argparse.Namespace, console: Any) -> int:
    found = plan(
        spec,
        cluster=arguments.cluster,
        devices=numbers(arguments.devices, "--devices") if arguments.devices else (),
        price=arguments.price,
        samples=arguments.samples,
        tokens=arguments.tokens,
        calibration=arguments.calibration,
    )
    files: dict[str, str] = {}
    if arguments.emit:
        from paceline.planning.emit import launch_files

        files = launch_files(found, run_file, arguments.emit, arguments.words[1:])
    if arguments.out is not None:
        _write(found.as_json(), files, arguments.out)
    if arguments.json:
        json.dump(finite(found.as_json()), sys.stdout, indent=2, ensure_ascii=False, default=as_json)
        print()
    elif files and arguments.out is None:
        for name, text in files.items():
            print(f"# ── {name}\n{text}" if len(files) > 1 else text, end="")
    else:
        from paceline.planning.show import show

        for part in show(found):
            console.print(part)
        if arguments.out is not None:
            print("written: " + ", ".join(str(arguments.out / name) for name in ("plan.json", *files)))
    return 0 if found.fits else 1


def _write(values: dict[str, Any], files: dict[str, str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be a folder: {error.strerror}") from None
    write_json(folder / "plan.json", values)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def numbers(text: str, option: str) -> list[int]:
    """`1,2,4` as numbers."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.lstrip("-").isdecimal() for word in words):
        raise UserError(f"{option}: {text!r} is not a list of numbers; write it as  {option} 1,2,4")
    if len(words) > MOST_NUMBERS:
        raise UserError(f"{option}: {len(words)} numbers are too many; give at most {MOST_NUMBERS}")
    return [int(word) for word in words]


def calibrate(arguments: argparse.Namespace, console: Any) -> int:
    from paceline.planning.calibrating.calibrate import has_gpu, measure, table
    from paceline.planning.calibrating.calibration import usual_file

    if arguments.measured is not None:
        return _recalibrate(arguments.measured, arguments.out or usual_file(), console)
    ranks = numbers(arguments.ranks, "--ranks")
    if min(ranks) < 1 or max(ranks) > 64:
        raise UserError(f"--ranks: {arguments.ranks} is not possible here; give numbers from 1 to 64")
    path = arguments.out or usual_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.threads < 0:
        raise UserError(f"--threads: {arguments.threads} is not possible; give 1 or more, or 0 to share the cores")
    found = measure(sorted(set(ranks)), _say, arguments.threads)
    if has_gpu():  # after the ranks: they are forked from this process
        from paceline.planning.calibrating.gpu_probes import measure_gpu

        found["gpu"] = measure_gpu(_say)
    write_json(path, found)
    console.print(table(path))
    console.print(_written(path), soft_wrap=True)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _written(file: Path) -> str:
    from paceline.planning.calibrating.calibration import usual_file

    if file == usual_file():
        return f"written: {file}; plans for cluster: local use it"
    return f"written: {file}; to plan by it:  paceline plan RUN --calibration {shlex.quote(str(file))}"


def _recalibrate(folder: Path, file: Path, console: Any) -> int:
    from paceline.measuring.recalibrate import recalibrate
    from paceline.record.units import duration

    correction, rows = recalibrate(folder, file)
    for row in rows:
        before, after = duration(row.before_s), duration(row.after_s)
        console.print(f"{row.label}: {duration(row.step_s)} per step; planned {before} before, {after} now")
    console.print(correction.words(), soft_wrap=True)
    console.print(_written(file), soft_wrap=True)
    return 0
