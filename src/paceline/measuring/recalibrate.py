"""What a measurement says about the calibration of its machine: `paceline calibrate --from runs/NAME-measure`.

The probes of a calibration work alone; a training has a loader, a loop and other kernels beside it. For each number of
ranks, two factors make the plan of a measured row take as long as the row did: one on all that computes, one on all
that travels.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.measuring.compare import price_of, terms_of
from paceline.measuring.result import read_measurement
from paceline.measuring.rows import Row
from paceline.planning.calibrating.calibration import Calibration, Correction, Scaled, read_calibration
from paceline.planning.formulas.steptime import StepTime
from paceline.planning.site import MOST_LOCAL_RANKS, Where
from paceline.planning.subject import Subject, subject_of
from paceline.record.events import read_events
from paceline.record.files import read_json, write_json
from paceline.record.run_dir import RunDir
from paceline.spec import RunSpec

ROUNDS = 30
LEAST, MOST = 1e-6, 1e6
"""Of a factor."""


@dataclass(frozen=True)
class Seen:
    """A measured row, and all that it takes to plan it."""

    row: Row
    spec: RunSpec
    subject: Subject

    def time(self, calibration: Calibration) -> StepTime:
        where = Where(*calibration.at(self.row.ranks, calibration.machine(MOST_LOCAL_RANKS)))
        found: StepTime = price_of(self.spec, self.subject, where).time
        return found


@dataclass(frozen=True)
class Corrected:
    """A measured row, and its plan before and after."""

    label: str
    step_s: float
    before_s: float
    after_s: float


def recalibrate(folder: Path, file: Path) -> tuple[Correction, list[Corrected]]:
    """Write what the measurement in `folder` says into the calibration `file`, beside what was probed."""
    if not file.is_file():
        raise UserError(f"{file} does not exist, so there is nothing to correct; make it with  paceline calibrate")
    probed = replace(read_calibration(file), correction=None)
    found = read_measurement(folder)
    host = found.environment.get("host")
    if host != probed.host:
        raise UserError(f"{folder} was measured on {host}, and {file} is of {probed.host}; both must be of one machine")
    specs = {row.label: _cpu_spec(RunDir.open(folder / row.runs[0])) for row in found.rows if row.step_s and row.runs}
    rows = [
        Seen(row, specs[row.label], subject_of(specs[row.label])) for row in found.rows if _tells(specs.get(row.label))
    ]
    if not rows:
        raise UserError(
            f"{folder} has no row to calibrate from: it takes data parallelism with exact sums, as in  --ranks 1,2"
        )
    date = datetime.date.today().isoformat()
    correction = Correction(str(folder), date, tuple(_scaled(probed, rows)))
    write_json(file, {**read_json(file), "correction": asdict(correction)})
    after = replace(probed, correction=correction)
    return correction, [
        Corrected(seen.row.label, seen.row.step_s or 0.0, seen.time(probed).step_s, seen.time(after).step_s)
        for seen in rows
    ]


def _cpu_spec(run: RunDir) -> RunSpec:
    start: Mapping[str, Any] = next(read_events(run.events_file(0), "start"), {})
    if start.get("device") != "cpu":
        raise UserError(f"{run.path} ran on {start.get('device')}; a calibration is of CPU cores")
    return run.spec()


def _tells(spec: RunSpec | None) -> bool:
    """What `tensor` and `pipeline` exchange is measured as compute, and local steps send only now and then."""
    return spec is not None and spec.parallel.tensor * spec.parallel.pipeline == 1 and spec.parallel.reduce == "exact"


def _scaled(probed: Calibration, rows: Sequence[Seen]) -> list[Scaled]:
    """One pair of factors for each number of ranks; of several layouts, their geometric mean."""
    by_ranks: dict[int, list[tuple[float, float]]] = {}
    for seen in rows:
        by_ranks.setdefault(seen.row.ranks, []).append(factors(probed, seen))
    return [
        Scaled(n, *(statistics.geometric_mean(each) for each in zip(*found, strict=True)))
        if n > 1
        else Scaled(n, statistics.geometric_mean(compute for compute, _ in found), None)
        for n, found in sorted(by_ranks.items())
    ]


def factors(probed: Calibration, seen: Seen) -> tuple[float, float]:
    """(compute, communication): with them, the plan has the measured times. What is between the parts is compute."""
    row = seen.row
    wanted = {"compute_s": (row.compute_s or 0.0) + row.other_s, "exposed_s": row.exposed_s or 0.0}
    compute = communication = 1.0
    for _ in range(ROUNDS):
        guess = Correction("", "", (Scaled(row.ranks, compute, communication),))
        planned = terms_of(seen.time(replace(probed, correction=guess)))
        now = compute, communication
        compute = _bounded(compute * wanted["compute_s"] / planned["compute_s"])
        if row.ranks > 1:
            communication = _bounded(communication * wanted["exposed_s"] / planned["exposed_s"])
        if math.dist(now, (compute, communication)) < 1e-6 * compute:
            break
    return compute, communication


def _bounded(factor: float) -> float:
    return min(MOST, max(LEAST, factor))
