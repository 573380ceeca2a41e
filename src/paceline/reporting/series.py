"""Rows that belong together, from whatever they were read: a measurement, plain runs, or a table of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import UserError
from paceline.layout import layout_of
from paceline.measuring.compare import Planned
from paceline.measuring.devices import with_mfu
from paceline.measuring.diagnose import Finding, diagnose, verdict
from paceline.measuring.result import Measurement, fits_of
from paceline.measuring.rows import Row, combined, priced, with_speedups
from paceline.measuring.scaling import Fit
from paceline.reporting.curve import RunView
from paceline.reporting.times import TimedRow


@dataclass(frozen=True)
class Place:
    """Where a number came from."""

    file: Path
    line: int | None = None


@dataclass(frozen=True)
class Series:
    name: str
    kind: str
    """strong, weak, or times (a table that says nothing else)."""
    rows: tuple[Row, ...]
    places: Mapping[str, Place]
    """Of each row, by its label."""
    fits: tuple[Fit, ...] = ()
    planned: tuple[Planned, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    usd_per_device_hour: float | None = None
    total_samples: int | None = None

    @property
    def timed(self) -> bool:
        """Whether the parts of a step are known."""
        return self.kind != "times"

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if row.recommended), None)


def from_measurement(found: Measurement, price: float | None) -> Series:
    if not any(row.ranks == 1 for row in found.rows):
        raise UserError(f"{found.file} has no one-rank row, which speed-up is counted from; measure  --ranks 1,2")
    usd = price if price is not None else found.usd_per_device_hour
    rows = found.rows if price is None else priced(found.rows, found.total_samples, price)
    lines = _label_lines(found.file)
    places = {row.label: Place(found.file, lines.get(row.label)) for row in rows}
    return Series(
        found.name,
        found.kind,
        tuple(rows),
        places,
        found.fits,
        found.planned,
        found.findings,
        found.notes,
        found.verdict,
        usd,
        found.total_samples,
    )


def _label_lines(file: Path) -> dict[str, int]:
    """The line of each row in measure.json: those of the list "rows"."""
    import json

    found: dict[str, int] = {}
    inside = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith('  "rows"'):
            inside = True
        elif inside and line.startswith("  ]"):
            break
        elif inside and line.startswith('      "label": '):
            found[json.loads(line.strip().rstrip(",").partition(": ")[2])] = number
    return found


def from_times(name: str, timed: Sequence[TimedRow], file: Path, price: float | None) -> Series:
    """A run of fixed length on several numbers of devices: all that is known is how long each took."""
    by_count: dict[int, list[TimedRow]] = {}
    for row in sorted(timed, key=lambda row: row.devices):
        by_count.setdefault(row.devices, []).append(row)
    rows, rates, places = [], {}, {}
    for n, found in by_count.items():
        label = f"{n} device{'s' * (n > 1)}"
        seconds = sorted(row.seconds for row in found)
        middle = seconds[(len(seconds) - 1) // 2]
        rows.append(Row(label, n, repeats=len(found), step_s=middle, step_s_low=seconds[0], step_s_high=seconds[-1]))
        rows[-1] = replace(rows[-1], samples_per_s=1 / middle)
        rates[label] = [1 / row.seconds for row in found]
        places[label] = Place(file, found[0].line)
    done = priced(with_speedups(rows, rates), 1, price)
    done = [replace(row, usd_per_million_samples=None) for row in done]
    laws = tuple(fits_of(done, weak=False))
    said = [line for line in verdict(done, [], laws) if not line.startswith("Why")]
    said.append("Why: a table of times does not say; measure a run to see where its steps go.")
    return Series(name, "times", tuple(done), places, laws, verdict=tuple(said), usd_per_device_hour=price)


def from_runs(runs: Sequence[RunView], price: float | None) -> Series | None:
    """Plain runs of one workload as rows, where at least two layouts with one rank among them can be compared."""
    timed = [run for run in runs if run.times is not None]
    if len(timed) < 2 or not any(run.ranks == 1 for run in timed) or len({run.ranks for run in timed}) < 2:
        return None
    rows, rates, places = [], {}, {}
    for run in sorted(timed, key=lambda run: run.ranks):
        layout = layout_of(run.spec)
        label = run.name
        row = Row(label, run.ranks, layout=layout.equation(), global_batch=layout.global_batch)
        assert run.times is not None
        rows.append(combined(replace(row, passes=layout.passes(layout.global_batch)), [run.times]))
        rates[label] = [run.times.samples_per_s]
        places[label] = Place(run.path / "summary.json", _line(run.path / "summary.json", '  "median"'))
    total = max(int(run.summary.get("samples") or 0) for run in timed)
    done = with_mfu(priced(with_speedups(rows, rates), total, price), {run.name: run.spec for run in timed})
    batches = {row.global_batch for row in rows}
    laws = tuple(fits_of(done, weak=len(batches) > 1))
    here = all(run.start.get("launcher") in ("paceline", "alone") for run in timed)  # others may spread over hosts
    cores = int(timed[0].start.get("cores") or 0) if here else 0
    findings = tuple(diagnose(done, cores))
    kind = "strong" if len(batches) == 1 else "weak"
    said = tuple(verdict(done, findings, laws))
    return Series("runs", kind, tuple(done), places, laws, (), findings, (), said, price, total)


def _line(file: Path, begins: str) -> int | None:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if line.startswith(begins)), None)
