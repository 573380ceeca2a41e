"""Rows that belong together, from whatever they were read: a measurement, runs, a table of times; and links."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from urllib.parse import quote

from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.measuring.compare import with_mfu
from paceline.measuring.diagnose import settled
from paceline.measuring.links import Link, read_links
from paceline.measuring.result import Conclusions, Measurement, explained, laws_of
from paceline.measuring.rows import (
    BatchLayout,
    MeasuredRow,
    TimedRow,
    combined,
    done,
    priced,
    with_speedups,
)
from paceline.measuring.words import beyond_text, decision_text
from paceline.plain_files import read_text
from paceline.record.run_dir import RunDir
from paceline.record.units import duration
from paceline.reporting.run_view import RunView, same_work
from paceline.reporting.times import TimesLine

NO_REASON = "Why: a table of times does not say; measure a run to see where its steps go."


@dataclass(frozen=True)
class FileLine:
    """Where a number came from."""

    file: Path
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file} line {self.line}" if self.line else str(self.file)

    def address(self, folder: Path) -> str:
        """As seen from the folder of the report."""
        relative = quote(os.fsencode(os.path.relpath(self.file.resolve(), folder.resolve())))
        return f"./{relative}#L{self.line}" if self.line else f"./{relative}"  # never taken for `scheme:…`


@dataclass(frozen=True, kw_only=True)
class Series(Conclusions):
    sources: Mapping[str, FileLine]
    """Of each row, by its label."""

    @property
    def timed(self) -> bool:
        """Whether the parts of a step are known."""
        return self.kind != "times"

    @property
    def measured(self) -> list[MeasuredRow]:
        """The rows of which the parts of a step are known."""
        return [row for row in self.rows if isinstance(row, MeasuredRow)]


def from_measurement(found: Measurement, price: float | None) -> Series:
    if not found.command and not any(row.ranks == 1 for row in found.rows):
        raise UserError(f"{found.file} has no one-rank row, which speed-up is counted from; measure  --ranks 1,2")
    lines = _lines(found.file, '"label"', "rows")
    lines = lines if len(lines) == len(found.rows) else [FileLine(found.file)] * len(found.rows)
    sources = {row.label: line for row, line in zip(found.rows, lines, strict=True)}
    series = Series(**{field.name: getattr(found, field.name) for field in fields(Conclusions)}, sources=sources)
    if price is None:
        return series
    return replace(series, rows=tuple(priced(found.rows, found.total_samples, price)), usd_per_device_hour=price)


def from_times(name: str, timed: Sequence[TimesLine], file: Path, price: float | None) -> Series:
    """A run of fixed length on several numbers of devices: all that is known is how long each took."""
    by_count: dict[int, list[TimesLine]] = {}
    for line in sorted(timed, key=lambda line: line.devices):
        by_count.setdefault(line.devices, []).append(line)
    rows, rates, sources = [], {}, {}
    for n, found in by_count.items():
        label = f"{n} device{'s' * (n > 1)}"
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
            )
        )
        rates[label] = [1 / line.seconds for line in found]
        sources[label] = FileLine(file, found[0].line)
    compared = done(settled(priced(with_speedups(rows, rates), 1, price)))
    compared = [replace(row, cost=replace(row.cost, usd_per_million_samples=None)) for row in compared]
    laws = laws_of(compared)
    return Series(
        name=name,
        kind="times",
        rows=tuple(compared),
        laws=laws,
        verdict=(decision_text(compared), beyond_text(compared, laws), NO_REASON),
        usd_per_device_hour=price,
        sources=sources,
    )


def from_runs(runs: Sequence[RunView], price: float | None) -> Series | None:
    """Plain runs of the same work as rows, where at least two layouts with one rank among them can be compared."""
    timed = [(run, run.times) for run in runs if run.times is not None]
    counts = {run.ranks for run, _ in timed}
    if 1 not in counts or len(counts) < 2 or not same_work([run for run, _ in timed]):
        return None
    rows, rates, sources = [], {}, {}
    for run, times in sorted(timed, key=lambda pair: pair[0].ranks):
        layout = layout_of(run.spec)
        batch = BatchLayout(layout.equation(), layout.global_batch, layout.passes(layout.global_batch))
        rows.append(combined(run.name, run.ranks, [times], batch))
        rates[run.name] = [times.samples_per_s]
        file = RunDir(run.path).summary_file
        sources[run.name] = next(iter(_lines(file, '"median"')), FileLine(file))
    total = max(run.summary.trained.samples for run, _ in timed if run.summary is not None)
    compared = with_mfu(priced(with_speedups(rows, rates), total, price), {run.name: run.spec for run, _ in timed})
    kind = "weak" if len({row.batch.global_batch for row in rows}) > 1 else "strong"
    starts = [run.start for run, _ in timed]
    here = all(start.get("launcher") in ("paceline", "alone") for start in starts)  # others may spread over hosts
    conclusions = explained(compared, kind, int(starts[0].get("cores") or 0) if here else 0)
    return Series(name="runs", total_samples=total, usd_per_device_hour=price, sources=sources, **conclusions)


def _lines(file: Path, begins: str, section: str = "") -> list[FileLine]:
    """The lines of a JSON file that begin so; of those inside a list at its top, where a `section` is named."""
    text = read_text(file).splitlines()
    first = next((i for i, line in enumerate(text) if line.startswith(f'  "{section}"')), len(text)) if section else 0
    last = next((i for i in range(first, len(text)) if text[i].startswith("  ]")), len(text)) if section else len(text)
    return [FileLine(file, i + 1) for i in range(first, last) if text[i].strip().startswith(begins)]


@dataclass(frozen=True)
class LinkMeasurement:
    """One measurement of links."""

    name: str
    links: tuple[Link, ...]
    sources: tuple[FileLine, ...]
    """Of each link."""

    @property
    def verdict(self) -> str:
        best = max(self.links, key=lambda link: link.bandwidth_bits_s)
        return (
            f"A link of {self.name} carries {best.rate}, the most that a "
            f"collective reached ({link_name(best)}); a small one takes {duration(best.latency_s)}."
        )


def read_link_measurement(folder: Path) -> LinkMeasurement:
    file = folder / "links.json"
    found, lines = read_links(file), _lines(file, '"collective"')
    lines = lines if len(lines) == len(found) else [FileLine(file)] * len(found)
    return LinkMeasurement(folder.resolve().name, tuple(found), tuple(lines))


def link_name(link: Link) -> str:
    """The collective, and between whom where that is not everyone."""
    return link.name if link.of_all_ranks else f"{link.name}, {link.between}"
