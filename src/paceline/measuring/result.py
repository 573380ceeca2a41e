"""A measurement and what follows from it: rows, laws, the plan beside them, and the findings. Kept as measure.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.measuring.compare import Planned, compare, with_mfu
from paceline.measuring.diagnose import diagnose, settled
from paceline.measuring.rows import (
    FailedRow,
    MeasuredRow,
    TimedRow,
    done,
    priced,
    row_from_json,
    row_to_json,
    with_speedups,
)
from paceline.measuring.scaling import LawFit, fit_laws, law_fit_from_json
from paceline.measuring.words import Finding, finding, notes, verdict
from paceline.record.files import checked_fields, from_flat, read_json
from paceline.record.tabular import Tabular
from paceline.spec import RunSpec

FORMAT = 1
PLAIN = (
    *("name", "workload", "kind", "steps", "total_samples", "usd_per_device_hour", "notes", "verdict"),
    *("environment", "spec"),
)
"""Values of the file that are as they are."""


@dataclass(frozen=True, kw_only=True)
class Conclusions:
    """Rows that belong together, and what follows from them."""

    name: str
    kind: str
    """strong (the same batch on all ranks), weak (the batch grows with them), or times (where only those are known)."""
    rows: tuple[TimedRow | FailedRow, ...]
    laws: tuple[LawFit, ...] = ()
    findings: tuple[Finding, ...] = ()
    planned: tuple[Planned, ...] = ()
    notes: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    total_samples: int | None = None
    usd_per_device_hour: float | None = None

    @property
    def recommended(self) -> TimedRow | None:
        return next((row for row in done(self.rows) if row.recommended), None)


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement(Tabular, Conclusions):
    """A run file or a command on several layouts: how long a step took, what follows, and where it is written."""

    folder: Path
    workload: str
    steps: int
    rows: tuple[MeasuredRow | FailedRow, ...]
    environment: dict[str, Any]
    spec: dict[str, Any]
    """Empty where a command was measured."""
    command: tuple[str, ...] = ()
    """What was measured from outside, word by word, in place of a spec."""

    @property
    def headline(self) -> str:
        return f"{self.name}: {self.verdict[0]}"

    def rows_of_table(self) -> list[dict[str, Any]]:
        return [row_to_json(row) for row in self.rows]

    @property
    def weak(self) -> bool:
        return self.kind == "weak"

    @property
    def file(self) -> Path:
        return self.folder / "measure.json"

    def to_json(self) -> dict[str, Any]:
        """What is derived; the runs that were done stand beside it in the file."""
        return {
            "workload": self.workload,
            "total_samples": self.total_samples,
            "usd_per_device_hour": self.usd_per_device_hour,
            "verdict": self.verdict,
            "notes": self.notes,
            "rows": [row_to_json(row) for row in self.rows],
            "fits": [asdict(law) for law in self.laws],
            "findings": [asdict(finding) for finding in self.findings],
            "plan": [asdict(row) for row in self.planned],
        }


def concluded(
    folder: Path,
    state: Mapping[str, Any],
    rows: Sequence[MeasuredRow | FailedRow],
    rates: Mapping[str, Sequence[float]],
    total_samples: int | None,
    price: float | None,
    specs: Mapping[str, RunSpec],
) -> Measurement:
    """From rows with times to all that can be said of them."""
    rows = with_mfu(priced(with_speedups(rows, rates), total_samples, price), specs)
    cores = int(state["environment"].get("cores") or 0)
    return Measurement(
        folder=folder,
        name=state["name"],
        workload=state["spec"].get("workload", ""),
        steps=state["steps"],
        planned=tuple(compare(rows, specs)),
        notes=tuple(notes(rows, cores, float(state["load"]))),
        total_samples=total_samples,
        usd_per_device_hour=price,
        environment=dict(state["environment"]),
        spec=dict(state["spec"]),
        command=tuple(state.get("command", ())),
        **explained(rows, state["kind"], cores),
    )


def explained(rows: Sequence[MeasuredRow | FailedRow], kind: str, cores: int) -> dict[str, Any]:
    """The conclusions that follow from compared rows alone."""
    rows = settled(rows)
    on_cores = cores and not any(row.resources.device for row in done(rows) if isinstance(row, MeasuredRow))
    laws = laws_of(rows, weak=kind == "weak", most=cores if on_cores else None)
    findings = tuple(map(finding, diagnose(rows, cores)))
    said = tuple(verdict(rows, findings, laws))
    return {"kind": kind, "rows": tuple(rows), "laws": laws, "findings": findings, "verdict": said}


def laws_of(rows: Sequence[TimedRow | FailedRow], weak: bool = False, most: int | None = None) -> tuple[LawFit, ...]:
    """The laws through the best layout of each number of ranks."""
    best: dict[int, TimedRow] = {}
    for row in done(rows):
        if row.ranks not in best or row.speedup > best[row.ranks].speedup:
            best[row.ranks] = row
    repeats = {n: row.scaling.speedups for n, row in sorted(best.items())}
    return tuple(fit_laws(repeats, weak, {n: row.speedup for n, row in best.items()}, most))


def read_measurement(folder: Path) -> Measurement:
    """A measurement from its folder; UserError where it is damaged or not finished."""
    file = folder / "measure.json"
    values = read_json(file)
    if values.get("format") != FORMAT:
        raise UserError(f"{file} is not a measurement of format {FORMAT}")
    if "rows" not in values:
        raise UserError(f"{file} is not finished; go on with the same  paceline measure  command")
    try:
        if values["kind"] not in ("strong", "weak"):
            raise ValueError(f"kind is {values['kind']!r:.40}")
        rows = tuple(map(row_from_json, values["rows"]))
        planned = tuple(from_flat(Planned, row) for row in values["plan"])
        if strange := {plan.label for plan in planned} - {row.label for row in done(rows)}:
            raise ValueError(f"a plan of {min(strange)!r:.40}, which was not measured")
        return Measurement(
            folder=folder,
            **checked_fields(
                Measurement, {"command": values.get("command", ()), **{name: values[name] for name in PLAIN}}
            ),
            rows=rows,
            laws=tuple(map(law_fit_from_json, values["fits"])),
            findings=tuple(from_flat(Finding, found) for found in values["findings"]),
            planned=planned,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {type(error).__name__} {error}") from None
