"""Correct a calibration by a measurement: `paceline calibrate --from runs/NAME-measure`.

The probes of a calibration run alone; training has a loader, a loop and other kernels too. For each number of ranks,
two factors make the plan of a measured row take as long as the row did: one on compute, one on communication.
"""

import datetime
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.config import RunSpec
from paceline.errors import UserError
from paceline.io.files import read_json, write_json
from paceline.layout import layout_of
from paceline.measurement.result import group_step_terms, read_measurement
from paceline.measurement.rows import MeasuredRow, drop_failed
from paceline.planner.calibration.calibration import Calibration, Correction, RankCorrection, read_calibration
from paceline.planner.cost_model import CostModel, build_cost_model
from paceline.planner.formulas.step_time import StepTime
from paceline.planner.target import MAX_LOCAL_RANKS, PricedCluster
from paceline.runlog.run_dir import RunDir

ROUNDS = 30
LEAST, MOST = 1e-6, 1e6


@dataclass(frozen=True)
class MeasuredRun:
    row: MeasuredRow
    spec: RunSpec
    subject: CostModel

    def time(self, calibration: Calibration) -> StepTime:
        where = PricedCluster(*calibration.at(self.row.ranks, calibration.machine(MAX_LOCAL_RANKS)))
        return self.subject.price(self.subject.layout(self.spec), where).time


@dataclass(frozen=True)
class CorrectedRow:
    label: str
    step_s: float
    before_s: float
    after_s: float


def update_calibration(folder: Path, file: Path) -> tuple[Correction, list[CorrectedRow]]:
    if not file.is_file():
        raise UserError(f"{file} does not exist; make it with  paceline calibrate", code="not-found")
    probed = replace(read_calibration(file), correction=None)
    found = read_measurement(folder)
    if found.command:
        raise UserError(f"{folder} measured a command; calibrate from that of a run file", code="not-supported")
    host = found.environment.get("host")
    if host != probed.host:
        raise UserError(f"{folder} was measured on {host}, and {file} on {probed.host}", code="conflict")
    specs = [(row, _read_cpu_spec(RunDir.open(folder / row.runs[0]))) for row in drop_failed(found.rows) if row.runs]
    rows = [
        MeasuredRun(row, spec, build_cost_model(spec))
        for row, spec in specs  # with other axes, communication is timed as compute; local steps rarely send
        if layout_of(spec).data == spec.parallel.ranks and spec.parallel.reduce == "exact"
    ]
    if not rows:
        raise UserError(f"{folder} has no row of data parallelism; measure  --ranks 1,2", code="not-supported")
    correction = Correction(folder.name, datetime.date.today().isoformat(), tuple(_average_factors(probed, rows)))
    write_json(file, {**read_json(file), "correction": asdict(correction)})
    after = replace(probed, correction=correction)
    return correction, [
        CorrectedRow(run.row.label, run.row.step_s, run.time(probed).step_s, run.time(after).step_s) for run in rows
    ]


def _read_cpu_spec(run: RunDir) -> RunSpec:
    start = run.start()
    if start.get("device") != "cpu":
        raise UserError(f"{run.path} ran on {start.get('device')}; a calibration is of CPU cores")
    return run.spec()


def _average_factors(probed: Calibration, rows: Sequence[MeasuredRun]) -> list[RankCorrection]:
    by_ranks: dict[int, list[tuple[float, float]]] = {}
    for run in rows:
        by_ranks.setdefault(run.row.ranks, []).append(solve_factors(probed, run))
    corrections = []
    for n, factors in sorted(by_ranks.items()):
        compute, communication = map(statistics.geometric_mean, zip(*factors, strict=True))
        corrections.append(RankCorrection(n, compute, communication if n > 1 else None))
    return corrections


def solve_factors(probed: Calibration, measured: MeasuredRun) -> tuple[float, float]:
    """Return the factors (compute, communication) with which the plan has the measured times; the rest is compute."""
    row = measured.row
    compute_s = row.parts.compute_s + row.other_s
    compute = communication = 1.0
    for _ in range(ROUNDS):
        guess = Correction("", "", (RankCorrection(row.ranks, compute, communication),))
        planned = group_step_terms(measured.time(replace(probed, correction=guess)))
        now = compute, communication
        compute = min(MOST, max(LEAST, compute * compute_s / planned["compute_s"]))
        if row.ranks > 1:
            communication = min(MOST, max(LEAST, communication * row.parts.exposed_s / planned["exposed_s"]))
        if math.dist(now, (compute, communication)) < 1e-6 * compute:
            break
    return compute, communication
