"""A measurement and what follows from it: rows, fits, the plan beside them, and the diagnosis. Kept as measure.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.measuring.compare import Planned, compare
from paceline.measuring.devices import with_mfu
from paceline.measuring.diagnose import Finding, diagnose, notes, verdict
from paceline.measuring.rows import Row, priced, row_from_json, with_speedups
from paceline.measuring.scaling import Fit, fits
from paceline.record.files import read_json
from paceline.spec import RunSpec

FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    folder: Path
    name: str
    workload: str
    kind: str
    """strong (the same batch on all ranks) or weak (the batch grows with them)."""
    steps: int
    rows: tuple[Row, ...]
    fits: tuple[Fit, ...]
    findings: tuple[Finding, ...]
    planned: tuple[Planned, ...]
    notes: tuple[str, ...]
    verdict: tuple[str, ...]
    total_samples: int | None
    usd_per_device_hour: float | None
    environment: dict[str, Any]
    spec: dict[str, Any]

    @property
    def weak(self) -> bool:
        return self.kind == "weak"

    @property
    def recommended(self) -> Row | None:
        return next((row for row in self.rows if row.recommended), None)

    @property
    def file(self) -> Path:
        return self.folder / "measure.json"

    def as_json(self) -> dict[str, Any]:
        """What is derived; the runs that were done stand beside it in the file."""
        return {
            "workload": self.workload,
            "total_samples": self.total_samples,
            "usd_per_device_hour": self.usd_per_device_hour,
            "verdict": list(self.verdict),
            "notes": list(self.notes),
            "rows": [row.as_json() for row in self.rows],
            "fits": [asdict(fit) for fit in self.fits],
            "findings": [asdict(finding) for finding in self.findings],
            "plan": [asdict(row) for row in self.planned],
        }


def concluded(
    folder: Path,
    state: Mapping[str, Any],
    rows: Sequence[Row],
    rates: Mapping[str, Sequence[float]],
    total_samples: int | None,
    price: float | None,
    specs: Mapping[str, RunSpec],
) -> Measurement:
    """From rows with times to all that can be said of them."""
    weak = state["kind"] == "weak"
    rows = priced(with_speedups(rows, rates), total_samples, price)
    rows = with_mfu(rows, specs)
    found = fits_of(rows, weak)
    cores = int(state["environment"].get("cores") or 0)
    findings = diagnose(rows, cores)
    return Measurement(
        folder=folder,
        name=state["name"],
        workload=state["spec"]["workload"],
        kind=state["kind"],
        steps=state["steps"],
        rows=tuple(rows),
        fits=tuple(found),
        findings=tuple(findings),
        planned=tuple(compare(rows, specs)),
        notes=tuple(notes(rows, cores, float(state["load"]))),
        verdict=tuple(verdict(rows, findings, found)),
        total_samples=total_samples,
        usd_per_device_hour=price,
        environment=dict(state["environment"]),
        spec=dict(state["spec"]),
    )


def fits_of(rows: Sequence[Row], weak: bool) -> list[Fit]:
    """The laws through the best layout of each number of ranks."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.speedup is not None and row.speedup > (best[row.ranks].speedup or 0 if row.ranks in best else 0):
            best[row.ranks] = row
    middles = {n: row.speedup for n, row in best.items() if row.speedup is not None}
    return fits({n: row.speedups for n, row in sorted(best.items())}, weak, middles)


def read_measurement(folder: Path) -> Measurement:
    """A measurement from its folder; UserError where it is damaged or not finished."""
    file = folder / "measure.json"
    values = read_json(file)
    if values.get("format") != FORMAT:
        raise UserError(f"{file} is not a measurement of format {FORMAT}")
    if "rows" not in values:
        raise UserError(f"{file} is not finished; go on with the same  paceline measure  command")
    try:
        return Measurement(
            folder=folder,
            **{k: values[k] for k in ("name", "workload", "kind", "steps", "total_samples", "usd_per_device_hour")},
            rows=tuple(row_from_json(row) for row in values["rows"]),
            fits=tuple(Fit(**{**fit, "curve": tuple(map(tuple, fit["curve"]))}) for fit in values["fits"]),
            findings=tuple(Finding(**finding) for finding in values["findings"]),
            planned=tuple(Planned(**row) for row in values["plan"]),
            notes=tuple(values["notes"]),
            verdict=tuple(values["verdict"]),
            environment=values["environment"],
            spec=values["spec"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {type(error).__name__} {error}") from None
