"""Build series of rows from a measurement, from runs or from a table of times; and read links.

devices,seconds            gpus,time,model            devices,minutes,setup,epochs,price,utilisation
1,19.53                    1,19.53,small              1,80,1x H100,200,3.29,16 %
4,42.34                    4,42.34,small              4,20,4x H100,200,12.36,35 %
"""

import csv
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.errors import UserError
from paceline.io.files import read_text
from paceline.io.format import plural
from paceline.layout import layout_of
from paceline.measurement.result import Conclusions, Measurement, add_mfu, draw_conclusions, fit_row_laws
from paceline.measurement.rows import BatchLayout, TimedRow, add_costs, add_speedups, combine_repeats, drop_failed
from paceline.measurement.run_times import RunTimes
from paceline.measurement.verdict import describe_decision, describe_extrapolation, describe_returns, mark_recommended
from paceline.reports.run_view import RunView, select_work
from paceline.runlog.machine import MachineLoad
from paceline.runlog.run_dir import RunDir

TIME_UNITS_S = {
    **dict.fromkeys(("seconds", "time", "time_s", "s", "step_s", "duration", "elapsed"), 1.0),
    **dict.fromkeys(("minutes", "min"), 60.0),
    **dict.fromkeys(("hours", "h"), 3600.0),
}
COLUMNS = {
    "devices": ("devices", "gpus", "ranks", "n", "processes", "nodes", "workers", "cores"),
    "seconds": tuple(TIME_UNITS_S),
    "epochs": ("epochs",),
    "price": ("price", "usd_per_hour", "usd/h"),
    "utilisation": ("utilisation", "utilization"),
    "memory": ("memory", "vram"),
}
"""Columns that may be there; a price is in USD per hour, of all devices of the row."""
MAX_BYTES, MAX_DEVICES = 1 << 24, 10**9


@dataclass(frozen=True)
class TimedSetup:
    """What a set-up of devices takes and costs; `line` is that of a table."""

    devices: int
    seconds: float
    line: int = 0
    epoch_s: float | None = None
    price: float | None = None  # USD per hour of all devices
    utilisation: str = ""
    memory: str = ""
    label: str = ""

    @property
    def usd(self) -> float:
        return self.seconds / 3600 * (self.price or 0.0)


def read_times_file(path: Path) -> dict[str, list[TimedSetup]]:
    """Read rows by name; a row that is given twice is a repeat."""
    try:
        text = read_text(path, MAX_BYTES, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"{path} cannot be read: {reason}", code="unreadable") from None
    delimiter = max(",;\t", key=text[:2000].count)
    cells = enumerate(csv.reader(text.splitlines(), delimiter=delimiter), 1)
    lines = [(n, [cell.strip() for cell in row]) for n, row in cells if any(row) and not row[0].strip().startswith("#")]
    head = [word.lower() for word in lines[0][1]] if lines else []
    places = {name: head.index(word) for name, words in COLUMNS.items() for word in head[::-1] if word in words}
    unit = 1.0
    if "devices" in places and "seconds" in places:
        unit = TIME_UNITS_S[head[places["seconds"]]]
        del lines[0]
    else:
        places = {"devices": 0, "seconds": 1}
    label = next((i for i in range(len(head)) if i not in places.values()), None)
    found: dict[str, list[TimedSetup]] = {}
    for number, row in lines:
        name = row[label] if label is not None and label < len(row) else path.stem
        found.setdefault(name, []).append(_parse_row(path, number, row, places, unit))
    if not found:
        raise UserError(f"{path} has no rows; add lines such as  1,19.5  for one device", code="invalid-data")
    for name, rows in found.items():
        if not any(row.devices == 1 for row in rows) and not all(row.price for row in rows):
            problem = f"speed-up is relative to one device, which {name!r} does not have; add  1,SECONDS"
            raise UserError(f"{path}: {problem}", code="missing-value")
    return found


def _parse_row(path: Path, number: int, row: list[str], places: Mapping[str, int], unit: float) -> TimedSetup:
    cells = {name: row[place] for name, place in places.items() if place < len(row)}
    try:
        epochs, price = (float(cells[name]) if cells.get(name) else None for name in ("epochs", "price"))
        seconds = unit * float(cells["seconds"])
        found = TimedSetup(
            devices=int(cells["devices"]),
            seconds=seconds,
            line=number,
            epoch_s=seconds / epochs if epochs else None,
            price=price,
            utilisation=cells.get("utilisation", ""),
            memory=cells.get("memory", ""),
        )
        positive = [value for value in (seconds, epochs, price) if value is not None]
        if not 1 <= found.devices <= MAX_DEVICES or not all(0 < value < math.inf for value in positive):
            raise ValueError
    except (ValueError, KeyError):
        problem = f"{','.join(row)[:60]!r} is not devices and seconds, as in  1,19.5"
        more = ";  head other columns  devices,seconds"
        raise UserError(f"{path} line {number}: {problem}{more}", code="invalid-data") from None
    return found


NO_REASON = "Why: not known from times alone; measure a run to see where its steps go."


@dataclass(frozen=True)
class SourceLine:
    file: Path
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file} line {self.line}" if self.line else str(self.file)

    def address(self, folder: Path) -> str:
        relative = quote(os.fsencode(os.path.relpath(self.file.resolve(), folder.resolve())))
        return f"./{relative}#L{self.line}" if self.line else f"./{relative}"  # never taken for `scheme:…`


@dataclass(frozen=True, kw_only=True)
class Series(Conclusions):
    sources: Mapping[str, SourceLine]
    epoch_s: Mapping[str, float] = field(default_factory=dict)  # by label


def from_measurement(found: Measurement, price: float | None) -> Series:
    if not found.command and not any(row.ranks == 1 for row in found.rows):
        raise UserError(f"{found.file} has no row of one rank, which speed-up is relative to; measure  --ranks 1,2")
    lines = _find_lines(found.file, '"label"', "rows")
    lines = lines if len(lines) == len(found.rows) else [SourceLine(found.file)] * len(found.rows)
    sources = {row.label: line for row, line in zip(found.rows, lines, strict=True)}
    epochs, total = found.spec.get("train", {}).get("epochs"), found.total_samples
    timed = drop_failed(found.rows) if epochs and total else []
    about: dict[str, Any] = {"epoch_s": {row.label: total / epochs / row.samples_per_s for row in timed}}
    about |= {field.name: getattr(found, field.name) for field in fields(Conclusions)}
    if price is not None:
        about |= {"rows": tuple(add_costs(found.rows, found.total_samples, price)), "usd_per_device_hour": price}
    return Series(**about, sources=sources)


def from_times_table(name: str, timed: Sequence[TimedSetup], file: Path, price: float | None) -> Series:
    """Build a series from the durations of one run on several numbers of devices."""
    by_count: dict[int, list[TimedSetup]] = {}
    for line in sorted(timed, key=lambda line: line.devices):
        by_count.setdefault(line.devices, []).append(line)
    rows, sources = [], {}
    for n, found in by_count.items():
        label = plural(n, "device")
        seconds = sorted(line.seconds for line in found)
        middle = seconds[(len(seconds) - 1) // 2]
        rows.append(
            TimedRow(
                label=label,
                ranks=n,
                repeats=len(found),
                step_s=middle,
                step_s_low=seconds[0],
                step_s_high=seconds[-1],
                samples_per_s=1 / middle,
                rates=tuple(1 / line.seconds for line in found),
            )
        )
        sources[label] = SourceLine(file, found[0].line)
    compared = drop_failed(mark_recommended(add_costs(add_speedups(rows), 1, price)))
    compared = [replace(row, cost=replace(row.cost, usd_per_million_samples=None)) for row in compared]
    laws = fit_row_laws(compared)
    more = (*describe_returns(compared), *describe_extrapolation(compared, laws), NO_REASON)
    return Series(
        name=name,
        kind="times",
        rows=tuple(compared),
        laws=laws,
        verdict=(describe_decision(compared), *more),
        usd_per_device_hour=price,
        sources=sources,
    )


def from_runs(runs: Sequence[RunView], price: float | None) -> list[Series]:
    """Build a series of each group of plain runs with equal work that has one rank and another number."""
    groups: dict[str, list[tuple[RunView, RunTimes]]] = {}
    for run in runs:
        if run.times is not None:
            groups.setdefault(repr(select_work(run.spec)), []).append((run, run.times))
    kept = [timed for timed in groups.values() if len(counts := {run.ranks for run, _ in timed}) > 1 and 1 in counts]
    return [_build_series(timed, _name_group(timed, kept), price) for timed in kept]


def _name_group(timed: Sequence[tuple[RunView, RunTimes]], groups: Sequence[Sequence[tuple[RunView, RunTimes]]]) -> str:
    """Return the name of its runs but for a last word such as 4gpu, if no other group has it; else what differs."""
    if len(groups) == 1:
        return "runs"
    names = [{re.sub(r"[-_. ]+[^-_. ]*\d[^-_. ]*$", "", run.spec.name) for run, _ in group} for group in groups]
    own = next(some for some, group in zip(names, groups, strict=True) if group is timed)
    if len(own) == 1 and sum(bool(own & other) for other in names) == 1:
        return own.pop()
    works = [select_work(group[0][0].spec) for group in groups]
    mine = select_work(timed[0][0].spec)
    differing = [key for key in mine if any(work.get(key) != mine[key] for work in works)]
    return ", ".join(f"{key.rpartition('.')[2]} {mine[key]}" for key in differing[:3]) or "runs"


def _build_series(timed: Sequence[tuple[RunView, RunTimes]], name: str, price: float | None) -> Series:
    """Build the rows of runs; those on the same layout are repeats."""
    by_layout: dict[str, list[tuple[RunView, RunTimes]]] = {}
    for run, times in sorted(timed, key=lambda pair: pair[0].ranks):
        by_layout.setdefault(repr(run.spec.parallel), []).append((run, times))
    rows, sources, epoch_s = [], {}, {}
    for repeats in by_layout.values():
        run, times = repeats[0]
        layout = layout_of(run.spec)
        batch = BatchLayout(layout.equation(), layout.global_batch, layout.passes(layout.global_batch))
        rows.append(combine_repeats(run.name, run.ranks, [times for _, times in repeats], batch))
        file = RunDir(run.path).summary_file
        sources[run.name] = next(iter(_find_lines(file, '"median"')), SourceLine(file))
        if run.summary is not None and run.summary.trained.epochs:
            epoch_s[run.name] = run.summary.trained.samples / run.summary.trained.epochs / rows[-1].samples_per_s
    total = max(run.summary.trained.samples for run, _ in timed if run.summary is not None)
    compared = add_mfu(add_costs(add_speedups(rows), total, price), {run.name: run.spec for run, _ in timed})
    kind = "weak" if len({row.batch.global_batch for row in rows}) > 1 else "strong"
    starts = [run.start for run, _ in timed]
    here = all(start.get("launcher") in ("paceline", "alone") for start in starts)  # others may spread over hosts
    machine = MachineLoad(int(starts[0].get("cores") or 0) if here else 0)
    given = {key: value for key, value, *_ in timed[0][0].spec.fields()}
    about = {"total_samples": total, "usd_per_device_hour": price, **draw_conclusions(compared, kind, machine, given)}
    return Series(name=name, sources=sources, epoch_s=epoch_s, **about)


def _find_lines(file: Path, begins: str, section: str = "") -> list[SourceLine]:
    """Find the lines of a JSON file that start so, within a top-level list if `section` names one."""
    text = read_text(file).splitlines()
    first = next((i for i, line in enumerate(text) if line.startswith(f'  "{section}"')), len(text)) if section else 0
    last = next((i for i in range(first, len(text)) if text[i].startswith("  ]")), len(text)) if section else len(text)
    return [SourceLine(file, i + 1) for i in range(first, last) if text[i].strip().startswith(begins)]
