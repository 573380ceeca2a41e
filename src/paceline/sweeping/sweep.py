"""The verb `sweep`: the trials are trained, several at once if asked, and ranked. What is done is never done again.

Halving trains all trials for a short while, and goes on with the best third of them, until one third is left that has
the whole length. A trial that goes on is its run, extended.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from paceline.arguments import make_folder
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.record.events import Status
from paceline.record.run_dir import RunDir
from paceline.spec import RunSpec, Source
from paceline.sweeping.plan import FACTOR, SweepChoices, SweepPlan, checked_jobs, plan_of
from paceline.sweeping.result import FILE, Sweep, TrialRow, measured, read_sweep, shown_values, summary_of
from paceline.sweeping.space import Values, drawn, grid
from paceline.sweeping.suggesting import suggested
from paceline.training.extension import length_of
from paceline.training.run import PRELOAD, train

Say = Callable[[str], None]


def sweep(
    spec: Source,
    values: Sequence[str] | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    say: Say = lambda text: None,
    **choices: Unpack[SweepChoices],
) -> Sweep:
    """Train a run with several values of its keys, `{"train.lr": [0.05, 0.1], "model.depth": "2..8"}`, and rank them.

    The folder `out` (runs/NAME-sweep) holds the runs, sweep.json, sweep.csv and a page. One that was stopped goes on.
    """
    from paceline.sweeping.page import write_page

    plan = plan_of(spec, values, out, choices)
    jobs = checked_jobs(choices.get("jobs", 1), plan.spec)
    make_folder(plan.folder)
    with RunDir(plan.folder).held(say):
        begun = begun_in(plan, retry=choices.get("retry", False))
        found = _halved(plan, begun, jobs, say) if plan.halving else _trained_all(plan, begun, jobs, say)
        write_page(found)
    if found.best is None:
        raise RunFailed(f"no trial came to its end; the first failed so: {found.trials[0].why.splitlines()[0]}")
    return found


def begun_in(plan: SweepPlan, retry: bool = False) -> Sweep:
    """The sweep that the folder holds, or a new one; another one is refused by what is different."""
    file = plan.folder / FILE
    if not file.exists():
        listed: list[Values] = []
        if plan.search != "optuna":
            listed = grid(plan.space) if plan.search == "grid" else drawn(plan.space, plan.trials, plan.seed)
        rows = tuple(TrialRow(number, values) for number, values in enumerate(listed, 1))
        found = Sweep(plan.folder, plan.score, tuple(plan.space), rows, plan.asked())
        found.write()
        return found
    found = read_sweep(plan.folder)
    before, now = _flat(found.asked), _flat(plan.asked())
    for key in dict.fromkeys([*now, *before]):
        if before.get(key) != now.get(key):
            name = key.removeprefix("keys.").removeprefix("spec.")
            raise UserError(
                f"{file} was begun with {name}={before.get(key)}, and this is {name}={now.get(key)}; sweep into "
                "another folder with  --out FOLDER"
            )
    fresh = [TrialRow(row.number, row.values) if retry and row.status == "failed" else row for row in found.trials]
    return replace(found, score=plan.score, trials=tuple(_looked_at(plan, row) for row in fresh))


def _looked_at(plan: SweepPlan, row: TrialRow) -> TrialRow:
    """As its run says, where another process has trained it: a job of an array, or a sweep that was killed."""
    if row.done or plan.halving or not (plan.folder / row.run / "summary.json").is_file():
        return row
    with suppress(UserError):
        if summary_of(plan.folder / row.run).status == Status.FINISHED:
            return outcome(plan, row, plan.lengths[-1])
    return row


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _trained_all(plan: SweepPlan, begun: Sweep, jobs: int, say: Say) -> Sweep:
    whole = plan.lengths[-1]
    if plan.search != "optuna":
        return _together(plan, begun, [row for row in begun.trials if not row.done], whole, jobs, say)
    found = begun
    while (left := plan.trials - sum(row.done for row in found.trials)) > 0:
        waiting = [row for row in found.trials if not row.done]
        for number in range(len(found.trials) + 1, len(found.trials) + 1 + min(jobs, left) - len(waiting)):
            before = [(row.values, None if row.score is None else found.goodness(row)) for row in found.trials]
            row = TrialRow(number, suggested(plan.space, before, plan.seed))
            found = found.with_row(row)
            waiting.append(row)
        found.write()
        found = _together(plan, found, waiting, whole, jobs, say)
    return found


def _halved(plan: SweepPlan, begun: Sweep, jobs: int, say: Say) -> Sweep:
    found = begun
    for part, length in enumerate(plan.lengths):
        left = [row for row in found.trials if row.status not in ("failed", "dropped")]
        say(f"{len(left)} trial{'s' * (len(left) != 1)}, {length_of(plan.spec.train)[0]}={length}")
        there = [row for row in left if length not in dict(row.history)]
        found = _together(plan, found, there, length, jobs, say)
        if part + 1 == len(plan.lengths):
            break
        at = {row.number: dict(row.history)[length] for row in found.trials if length in dict(row.history)}
        down = found.score.startswith("-")
        order = sorted(at, key=lambda number: (math.isnan(at[number]), at[number] if down else -at[number], number))
        for number in order[math.ceil(len(order) / FACTOR) :]:
            found = found.with_row(replace(found.trials[number - 1], status="dropped"))
        found.write()
    return found


def _together(plan: SweepPlan, found: Sweep, rows: Sequence[TrialRow], length: int, jobs: int, say: Say) -> Sweep:
    """These trials up to this length, so many at once; kept after each."""
    if jobs == 1:
        for row in rows:
            found = _noted(found, _tried(plan, row, length, 0, 1), say)
        return found
    waiting, slots = list(rows), list(range(jobs))
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[TrialRow], int] = {}
        try:
            while waiting or running:
                while waiting and slots:
                    slot = slots.pop(0)
                    running[pool.submit(_tried, plan, waiting.pop(0), length, slot, jobs)] = slot
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    slots.append(running.pop(future))
                    found = _noted(found, future.result(), say)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return found


def _noted(found: Sweep, row: TrialRow, say: Say) -> Sweep:
    found = found.with_row(row)
    found.write()
    told = f"{found.metric} {row.score:.5g}" if row.score is not None else f"failed: {row.why.splitlines()[0]}"
    say(f"trial {row.number}: {shown_values(row, found.keys)}: {told}")
    return found


def _tried(plan: SweepPlan, row: TrialRow, length: int, slot: int, jobs: int) -> TrialRow:
    """The row of a trial, trained up to this length; KeyboardInterrupt where it was asked to stop."""
    try:
        spec = plan.spec_of(row, length)
        if jobs > 1 and not spec.parallel.threads:
            spec = spec.replace({"parallel.threads": max(1, len(os.sched_getaffinity(0)) // jobs)})
        status = trained_apart(spec, plan.folder, slot if jobs > 1 else None)
    except PacelineError as error:
        return replace(row, status="failed", why=str(error), score=None)
    if status == "stopped":
        raise KeyboardInterrupt
    return outcome(plan, row, length)


def outcome(plan: SweepPlan, row: TrialRow, length: int) -> TrialRow:
    """What the run of a trial left in its folder."""
    metric, best = plan.score.removeprefix("-"), plan.spec.train.patience > 0
    return measured(row, summary_of(plan.folder / row.run), metric, length, best)


def trained_apart(spec: RunSpec, folder: Path, slot: int | None = None) -> str:
    """In new processes, so that a trial that dies is a row, and the next has all the memory."""
    if spec.parallel.ranks > 1:
        return str(train(spec, folder, again=True, show=False).status)
    from paceline.launch.local import run_ranks

    return run_ranks(partial(_trained, spec, folder, slot), (), 1, PRELOAD)[0]


def _trained(spec: RunSpec, folder: Path, slot: int | None) -> str:
    if slot is not None:
        _take_device(slot)
    return str(train(spec, folder, again=True, show=False).status)


def _take_device(slot: int) -> None:
    """One of several for each of the trials that are trained at once, before this process has looked for devices."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else list(map(str, range(torch.cuda.device_count())))
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
