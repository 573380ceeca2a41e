"""Build a measurement: rows, scaling laws, the plan beside them and the findings; kept as measure.json."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.config import RunSpec
from paceline.errors import PacelineError, UserError
from paceline.io.files import catch_damage, flatten_keys, from_flat, read_json, validate_fields
from paceline.io.table import Tabular
from paceline.measurement.diagnosis import Finding, diagnose
from paceline.measurement.rows import (
    FailedRow,
    MeasuredRow,
    TimedRow,
    add_costs,
    add_speedups,
    change_rows,
    drop_failed,
    dump_measured_row,
    parse_measured_row,
)
from paceline.measurement.scaling_laws import LawFit, fit_laws, parse_law_fit
from paceline.measurement.verdict import collect_notes, describe_verdict, mark_recommended
from paceline.runlog.machine import MachineLoad

TERM_ASSUMPTIONS = {
    "compute_s": "the arithmetic rate of a rank",
    "exposed_s": "the rate of the link, or how much of it compute hides",
    "data_s": "the rate of the input",
}
NOTABLE_DIFFERENCE = 0.1  # of the measured step
PEAK_OF = {"fp8": "bf16"}  # all but the products are bf16


@dataclass(frozen=True)
class PlannedRow:
    label: str
    step_s: float
    data_s: float
    compute_s: float  # with the update and the launches
    comm_s: float
    exposed_s: float  # with waiting for the slowest rank
    memory_bytes: float
    speedup: float | None
    calibrated: bool
    residual: float  # measured / planned - 1
    off: str  # the term that is off most


def compare_with_plan(rows: Sequence[MeasuredRow | FailedRow], specs: Mapping[str, RunSpec]) -> list[PlannedRow]:
    from paceline.planner.cost_model import build_cost_model

    measured = [row for row in drop_failed(rows) if row.label in specs]
    planned: list[PlannedRow] = []
    alone: float | None = None
    site: Any = None
    for row in measured:
        with suppress(PacelineError):  # of what cannot be planned, as on more ranks than the site has
            site = site or _find_site(measured, specs)
            model = build_cost_model(specs[row.label])
            found = model.price(model.layout(specs[row.label]), site.at(row.ranks))
            if alone is None and row.ranks == 1:
                alone = found.samples_s
            calibrated = bool(site.calibrated) or not site.shared
            planned.append(_build_planned_row(row, found, found.samples_s / alone if alone else None, calibrated))
    return planned


def _find_site(measured: Sequence[MeasuredRow], specs: Mapping[str, RunSpec]) -> Any:
    """Return where the rows were measured; a container may hide its devices from the planner, but not from the run."""
    from paceline.hardware.catalogue import match_driver_name
    from paceline.planner.target import resolve_target

    site = resolve_target(specs[measured[0].label].cluster)
    device = measured[0].resources.device
    kind = match_driver_name(device) if site.shared and device else None
    return site if kind is None else resolve_target(f"{max(row.ranks for row in measured)}x{kind.name}")


def group_step_terms(time: Any) -> dict[str, float]:
    return {
        "data_s": time.data_s,
        "compute_s": time.compute_s + time.update_s + time.overhead_s + time.bubble_s + time.offload_s,
        "exposed_s": time.exposed_s + time.waiting_s,
    }


def _build_planned_row(row: MeasuredRow, found: Any, speedup: float | None, calibrated: bool) -> PlannedRow:
    """Return the planned terms of a measured row, and the term that is off most."""
    memory, on_cores = found.memory, found.where.cluster.device.synchronous
    terms, off = group_step_terms(found.time), ""
    differences = ((getattr(row.parts, name) - value, name) for name, value in terms.items())
    off_s, worst = max(differences, key=lambda pair: abs(pair[0]))
    if abs(off_s) > NOTABLE_DIFFERENCE * row.step_s:
        more = "more" if off_s > 0 else "less"
        off = f"{worst} is {abs(off_s) * 1e3:.3g} ms {more} than planned: {TERM_ASSUMPTIONS[worst]}"
    return PlannedRow(
        label=row.label,
        step_s=found.step_s,
        **terms,
        comm_s=found.time.comm_s,
        memory_bytes=memory.total_bytes if on_cores else memory.allocated_bytes,
        speedup=speedup,
        calibrated=calibrated,
        residual=row.step_s / found.step_s - 1,
        off=off,
    )


def add_mfu(rows: Sequence[MeasuredRow | FailedRow], specs: Mapping[str, RunSpec]) -> list[MeasuredRow | FailedRow]:
    def add(row: MeasuredRow) -> MeasuredRow:
        mfu = _compute_mfu(row, specs[row.label]) if row.label in specs else row.resources.mfu
        return replace(row, resources=replace(row.resources, mfu=mfu))

    return change_rows(rows, add)


def _compute_mfu(row: MeasuredRow, spec: RunSpec) -> float | None:
    from paceline.hardware.catalogue import match_driver_name
    from paceline.planner.cost_model import build_cost_model

    kind = match_driver_name(row.resources.device) if row.resources.device else None
    peak = kind.flops_s.get(PEAK_OF.get(spec.train.precision, spec.train.precision)) if kind is not None else None
    if not peak or row.fits:
        return None
    try:
        return build_cost_model(spec).flops_per_sample * row.samples_per_s / row.ranks / peak
    except PacelineError:
        return None


FORMAT = 1
PLAIN_KEYS = ("name", "workload", "kind", "steps", "total_samples", "usd_per_device_hour", "notes", "verdict")


@dataclass(frozen=True, kw_only=True)
class Conclusions:
    name: str
    kind: Literal["strong", "weak", "times"]  # times: nothing else is known
    rows: tuple[TimedRow | FailedRow, ...]
    laws: tuple[LawFit, ...] = ()
    findings: tuple[Finding, ...] = ()
    planned: tuple[PlannedRow, ...] = ()
    notes: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    total_samples: int | None = None
    usd_per_device_hour: float | None = None

    @property
    def timed(self) -> bool:
        return self.kind != "times"

    @property
    def measured(self) -> list[MeasuredRow]:
        return [row for row in self.rows if isinstance(row, MeasuredRow)]

    @property
    def recommended(self) -> TimedRow | None:
        return next((row for row in drop_failed(self.rows) if row.recommended), None)


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement(Tabular, Conclusions):
    """A run file or a command, measured on several layouts."""

    folder: Path
    workload: str
    steps: int
    rows: tuple[MeasuredRow | FailedRow, ...]
    environment: dict[str, Any]
    spec: dict[str, Any]
    command: tuple[str, ...] = ()  # in place of a spec

    @property
    def headline(self) -> str:
        return f"{self.name}: {self.verdict[0]}"

    def rows_of_table(self) -> list[dict[str, Any]]:
        rows = [dump_measured_row(row) for row in self.rows]
        names = dict.fromkeys(name for row in rows for name in row)
        return [{name: row.get(name) for name in names} for row in rows]

    @property
    def file(self) -> Path:
        return self.folder / "measure.json"

    def to_json(self) -> dict[str, Any]:
        names = ("workload", "total_samples", "usd_per_device_hour", "verdict", "notes")
        return {name: getattr(self, name) for name in names} | {
            "rows": self.rows_of_table(),
            "fits": [asdict(law) for law in self.laws],
            "findings": [asdict(finding) for finding in self.findings],
            "plan": [asdict(row) for row in self.planned],
        }


def build_measurement(
    folder: Path,
    state: Mapping[str, Any],
    rows: Sequence[MeasuredRow | FailedRow],
    total_samples: int | None,
    usd_per_device_hour: float | None,
    specs: Mapping[str, RunSpec],
) -> Measurement:
    """Return the measurement of rows: costs, MFU, plan, findings; `state` is that of measure.json. Writes nothing."""
    rows = add_mfu(add_costs(add_speedups(rows), total_samples, usd_per_device_hour), specs)
    machine = MachineLoad(int(state["environment"].get("cores") or 0), float(state["load"]))
    return Measurement(
        folder=folder,
        name=state["name"],
        workload=state["spec"].get("workload", ""),
        steps=state["steps"],
        planned=tuple(compare_with_plan(rows, specs)),
        notes=tuple(collect_notes(rows, machine)),
        total_samples=total_samples,
        usd_per_device_hour=usd_per_device_hour,
        environment=dict(state["environment"]),
        spec=dict(state["spec"]),
        command=tuple(state.get("command", ())),
        **draw_conclusions(rows, state["kind"], machine, flatten_keys(state["spec"])),
    )


def draw_conclusions(
    rows: Sequence[MeasuredRow | FailedRow], kind: str, machine: MachineLoad, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what follows from rows: the recommended one, laws, findings and verdict. `given` is the run file."""
    rows, cores = mark_recommended(rows), machine.cores
    on_cores = cores and not any(row.resources.device for row in drop_failed(rows))
    laws = fit_row_laws(rows, weak=kind == "weak", most=cores if on_cores else None)
    findings = diagnose(rows, cores, given)
    verdict = tuple(describe_verdict(rows, findings, laws, machine))
    return {"kind": kind, "rows": tuple(rows), "laws": laws, "findings": findings, "verdict": verdict}


def fit_row_laws(
    rows: Sequence[TimedRow | FailedRow], weak: bool = False, most: int | None = None
) -> tuple[LawFit, ...]:
    best: dict[int, TimedRow] = {}
    for row in drop_failed(rows):
        if row.ranks not in best or row.speedup > best[row.ranks].speedup:
            best[row.ranks] = row
    repeats = {n: row.scaling.speedups for n, row in sorted(best.items())}
    return tuple(fit_laws(repeats, weak, {n: row.speedup for n, row in best.items()}, most))


def read_measurement(folder: Path) -> Measurement:
    file = folder / "measure.json"
    values = read_json(file)
    if values.get("format") != FORMAT:
        raise UserError(f"{file} is not a measurement of format {FORMAT}", code="invalid-format")
    if "rows" not in values:
        raise UserError(f"{file} is not finished; run the same  paceline measure  command again")
    with catch_damage(file):
        rows = tuple(map(parse_measured_row, values["rows"]))
        labels = {row.label for row in drop_failed(rows)}
        plain = {name: values[name] for name in (*PLAIN_KEYS, "environment", "spec")}
        plain["command"] = values.get("command", ())
        return Measurement(
            folder=folder,
            **validate_fields(Measurement, plain),
            rows=rows,
            laws=tuple(map(parse_law_fit, values["fits"])),
            findings=tuple(from_flat(Finding, finding) for finding in values["findings"]),
            planned=tuple(from_flat(PlannedRow, row) for row in values["plan"] if row["label"] in labels),
        )
