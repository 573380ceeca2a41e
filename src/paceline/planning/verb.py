"""The verbs `plan` and `calibrate` as commands: words in, tables or JSON out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import registry
from paceline.arguments import make_folder, numbers
from paceline.errors import UserError
from paceline.planning.plan import Plan, plan
from paceline.planning.rows import Rates, Wishes, hours_of
from paceline.planning.what_if import what_if_of
from paceline.record.files import print_json, read_json, write_atomic, write_json
from paceline.spec import COMMAND_LINE, RunSpec, build, overrides_of
from paceline.spec.yaml_file import put
from paceline.terminal import hand_over, say, warn


def spec_of_options(arguments: argparse.Namespace) -> RunSpec | None:
    """The run that options describe in place of a run file; None where there are none."""
    given = {
        option: (workload, what.key, str(vars(arguments)[what.key]))
        for option, (workload, what) in registry.plan_options().items()
        if vars(arguments)[what.key] is not None
    }
    if not given:
        return None
    workload = next(iter(given.values()))[0]
    first = next(iter(registry.entry_of(workload).plan_options))
    if first not in given:
        option, (_, key, _) = next(iter(given.items()))
        raise UserError(f"{option}: it goes with {first}; with a run file, type  {key}=…")
    if files := [word for word in arguments.words if "=" not in word]:
        raise UserError(f"{first} stands in place of a run file, and {files[0]!r} was given too; leave one of them out")
    if arguments.emit:
        raise UserError(f"--emit: launch files start a run file, and {first} is none; write one that names it")
    values: dict[str, Any] = {"name": workload, "workload": workload}
    settings = {**overrides_of(arguments.words), **{key: value for _, key, value in given.values()}}
    for key, value in settings.items():
        put(values, key, value)
    return build(values, dict.fromkeys(settings, COMMAND_LINE))


def run(spec: RunSpec, run_file: Path, arguments: argparse.Namespace, console: Any) -> int:
    def ask(asked: RunSpec, devices: Sequence[int]) -> Plan:
        return plan(
            asked,
            cluster=arguments.cluster,
            devices=devices,
            price=Rates(arguments.price, arguments.spot_price, arguments.spot),
            samples=arguments.samples,
            tokens=arguments.tokens,
            calibration=arguments.calibration,
            wishes=wishes,
            what_if=what_if,
        )

    what_if = what_if_of(arguments.what_if) if arguments.what_if is not None else None
    deadline = hours_of(arguments.deadline) if arguments.deadline else None
    wishes = Wishes(deadline, arguments.budget, arguments.min_efficiency)
    if arguments.page is not None and (arguments.page.is_dir() or not arguments.page.parent.is_dir()):
        raise UserError(f"--page: {arguments.page} cannot be a file; give one in a folder that exists, as  plan.html")
    found = ask(spec, numbers(arguments.devices, "--devices") if arguments.devices else ())
    if arguments.page is not None:
        from paceline.planning.page.page import page

        warn(f"planning every setting of {arguments.page}")
        write_atomic(arguments.page, page(found, ask, _command(arguments)))
    files: dict[str, str] = {}
    if arguments.emit:
        from paceline.planning.emit import launch_files

        files = launch_files(found, run_file, arguments.emit, arguments.words[1:])
    if arguments.out is not None:
        _write(found.as_json(), files, arguments.out)
    if arguments.json:
        print_json(found.as_json())
    elif files and arguments.out is None:
        for name, text in files.items():
            hand_over(f"# ── {name}\n{text}" if len(files) > 1 else text)
    else:
        from paceline.planning.show import show

        for part in show(found):
            console.print(part)
        if arguments.out is not None:
            say("written: " + ", ".join(str(arguments.out / name) for name in ("plan.json", *files)))
        if arguments.page is not None:
            say(f"written: {arguments.page}")
    return 0 if found.fits else 1


def _command(arguments: argparse.Namespace) -> list[str]:
    """The words that a page's settings are added to."""
    given = {"--cluster": arguments.cluster, "--samples": arguments.samples, "--tokens": arguments.tokens}
    given |= {"--price": arguments.price, "--spot-price": arguments.spot_price, "--budget": arguments.budget}
    given |= {
        "--what-if": arguments.what_if,
        "--min-efficiency": arguments.min_efficiency,
        "--calibration": arguments.calibration,
    }
    given |= {option: vars(arguments)[what.key] for option, (_, what) in registry.plan_options().items()}
    said = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return ["paceline", "plan", *arguments.words, *said, *["--spot"] * arguments.spot]


def _write(values: dict[str, Any], files: dict[str, str], folder: Path) -> None:
    make_folder(folder)
    write_json(folder / "plan.json", values)
    for name, text in files.items():
        write_atomic(folder / name, text)


def _is_calibration(path: Path) -> bool:
    try:
        return "measured" in read_json(path)
    except UserError:
        return False


def calibrate(arguments: argparse.Namespace, console: Any) -> int:
    from paceline.planning.calibrating.calibrate import has_gpu, measure, table
    from paceline.planning.calibrating.calibration import usual_file, written

    ranks = numbers(arguments.ranks, "--ranks")
    if min(ranks) < 1 or max(ranks) > 64:
        raise UserError(f"--ranks: {arguments.ranks} is not possible here; give numbers from 1 to 64")
    path = arguments.out or usual_file()
    if arguments.out is not None and path.is_file() and not _is_calibration(path):
        raise UserError(f"--out: {path} is there and is no calibration; name another file, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.threads < 0:
        raise UserError(f"--threads: {arguments.threads} is not possible; give 1 or more, or 0 to share the cores")
    found = measure(sorted(set(ranks)), warn, arguments.threads)
    if has_gpu():  # after the ranks: they are forked from this process
        from paceline.planning.calibrating.gpu_probes import measure_gpu

        found["gpu"] = measure_gpu(warn)
    write_json(path, found)
    if arguments.json:
        print_json(found)
        return 0
    console.print(table(path))
    console.print(written(path), soft_wrap=True)
    return 0
