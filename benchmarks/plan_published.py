"""How far the planner is from published measurements: by source, each left out of the fit that prices it.

    python benchmarks/plan_published.py MEASUREMENTS.csv              # table; about three minutes on one core
    python benchmarks/plan_published.py MEASUREMENTS.csv --by source  # 68 folds, not 19: a quarter of an hour
    python benchmarks/plan_published.py MEASUREMENTS.csv --shipped    # with the numbers in physics.py, in a second
    python benchmarks/plan_published.py MEASUREMENTS.csv --fit        # fit to all rows and print the numbers
    python benchmarks/plan_published.py MEASUREMENTS.csv --shipped --rows ROWS.csv   # and every row, with its source

By default a fold leaves out everything that one group of people measured (`foundry`, `bloom`, …), which is harder than
leaving out one of their tables (`--by source`).
Fits start from the middle of each number's range and are drawn weakly towards it: the shipped values, which have seen
all rows, play no part.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).parent))
from published_rows import Row, Scaling, read_rows, scalings
from unknown_shapes import count_flops, data_parallel_step_s

from paceline.planner.formulas.memory import estimate_memory
from paceline.planner.formulas.placement import GPU_PHYSICS, PHYSICS_TABLE, Physics
from paceline.planner.formulas.step_time import StepPricer

SOFT = 0.05
"""Relative error beyond which a row counts linearly: typos and busy machines should not steer a fit."""
PULL = 1.0
"""Weight of the middle of a number's range, in rows."""
FITTED = [name for name in PHYSICS_TABLE if name != "packed_efficiency"]
"""No published row has texts end to end."""
Array = np.ndarray


@dataclass(frozen=True)
class Evidence:
    """The rows that can be judged, by what was measured."""

    steps: tuple[Row, ...]
    speedups: tuple[Scaling, ...]
    memories: tuple[Row, ...]

    def folds(self, by: str) -> list[str]:
        named = [getattr(r, by) for r in (*self.steps, *(s.row for s in self.speedups), *self.memories)]
        return list(dict.fromkeys(named))

    def where(self, keep: Callable[[Row], bool]) -> Evidence:
        return Evidence(
            tuple(filter(keep, self.steps)),
            tuple(s for s in self.speedups if keep(s.row)),
            tuple(filter(keep, self.memories)),
        )


def evidence(path: Path) -> Evidence:
    rows = read_rows(path)
    transformers = [r for r in rows if r.model is not None]
    return Evidence(
        tuple(r for r in transformers if r.step_s and r.cluster and not r.low_quality),
        tuple(scalings(rows)),
        tuple(r for r in transformers if r.memory_bytes),
    )


# ── predictions over measurements


def step_ratios(rows: Sequence[Row], physics: Physics) -> Array:
    return np.array([_step_s(r, physics) / (r.step_s or math.nan) for r in rows])


def _step_s(row: Row, physics: Physics) -> float:
    assert row.model is not None
    assert row.cluster is not None
    return StepPricer(row.model.blocks, row.placement, row.cluster, row.numbers, physics).price().step_s


def speedup_ratios(pairs: Sequence[Scaling], physics: Physics) -> Array:
    return np.array([_speedup(p, physics) / p.speedup for p in pairs])


def _speedup(pair: Scaling, physics: Physics) -> float:
    """From the measured rate of one device, as somebody would who has one and asks about more."""
    row, base = pair.row, pair.base
    assert row.cluster is not None
    passed = (
        row.placement.micro_batch * row.placement.accumulate / (base.placement.micro_batch * base.placement.accumulate)
    )
    alone_s = (base.step_s or math.nan) * passed
    ranks = row.cluster.devices
    together_s = data_parallel_step_s(
        alone_s, row.params, ranks, row.cluster, row.numbers, physics, row.placement.accumulate
    )
    return ranks * alone_s / together_s


def memory_ratios(rows: Sequence[Row], physics: Physics) -> Array:
    return np.array([_memory(r, physics) / (r.memory_bytes or math.nan) for r in rows])


def _memory(row: Row, physics: Physics) -> float:
    assert row.model is not None
    priced = estimate_memory(row.model.blocks, row.placement, row.numbers, physics)
    without = {"whole": 0.0, "reserved": priced.context_bytes, "allocated": priced.total_bytes - priced.allocated_bytes}
    return priced.total_bytes - without[row.counted]


# ── rivals


def half_of_peak(rows: Sequence[Row]) -> Array:
    """A constant 50 % MFU."""
    ratios = []
    for r in rows:
        assert r.model is not None
        assert r.cluster is not None
        rate = 0.5 * r.cluster.device.peak_flops_s(r.numbers.matmul) * r.cluster.devices
        batch = r.placement.micro_batch * r.placement.accumulate * r.placement.data
        ratios.append(batch * count_flops(r.model) / rate / (r.step_s or math.nan))
    return np.array(ratios)


def linear(pairs: Sequence[Scaling]) -> Array:
    """Twice the devices, twice the speed."""
    return np.array([(p.row.cluster.devices if p.row.cluster else math.nan) / p.speedup for p in pairs])


def states_only(rows: Sequence[Row]) -> Array:
    """Weights, gradients and optimiser states, divided as ZeRO divides them; nothing else."""
    ratios = []
    for r in rows:
        assert r.model is not None
        m = estimate_memory(r.model.blocks, r.placement, r.numbers, GPU_PHYSICS)
        ratios.append((m.weights_bytes + m.gradients_bytes + m.states_bytes) / (r.memory_bytes or math.nan))
    return np.array(ratios)


# ── fitting


def _to_physics(x: Sequence[float]) -> Physics:
    values = {}
    for name, v in zip(FITTED, x, strict=True):
        low, high = (float(PHYSICS_TABLE[name][limit]) for limit in ("low", "high"))
        values[name] = low * (high / low) ** float(v) if low > 0 else float(v) * high
    return replace(GPU_PHYSICS, **values)


def fit(seen: Evidence, rounds: int = 14) -> Physics:
    """Least relative errors, as they are judged; sources with many rows weigh by the square root of their number.

    Fourteen rounds from the middle have converged. To start near a fit that has seen all rows and stop early would not:
    part of what it has seen would stay.
    """
    middle = np.full(len(FITTED), 0.5)
    weights = [_weights([r.source for r in group]) for group in _groups(seen)]

    def residuals(x: Array) -> Array:
        physics = _to_physics(x)
        ratios = (
            step_ratios(seen.steps, physics),
            speedup_ratios([p for p in seen.speedups if not p.row.low_quality], physics),
            memory_ratios([r for r in seen.memories if not r.low_quality], physics),
        )
        errors = [(ratio - 1) * w for ratio, w in zip(ratios, weights, strict=True)]
        return np.concatenate([*errors, (x - middle) * PULL])

    found = least_squares(
        residuals, middle, bounds=(0, 1), loss="soft_l1", f_scale=SOFT, max_nfev=rounds, diff_step=1e-3
    )
    return _to_physics(found.x)


def _groups(seen: Evidence) -> tuple[list[Row], list[Row], list[Row]]:
    return (
        list(seen.steps),
        [p.row for p in seen.speedups if not p.row.low_quality],
        [r for r in seen.memories if not r.low_quality],
    )


def _weights(sources: Sequence[str]) -> Array:
    counts = {s: sources.count(s) for s in set(sources)}
    return np.array([counts[s] ** -0.25 for s in sources])


def left_out(whole: Evidence, by: str, say: Callable[[str], None] = lambda _: None) -> dict[str, Physics]:
    """For each fold (by `family` or `source`), the numbers fitted to all others."""
    fits = {}
    for fold in whole.folds(by):
        say(f"fitting without {fold}")
        fits[fold] = fit(whole.where(lambda r, name=fold: getattr(r, by) != name))  # type: ignore[misc]
    return fits


# ── the table


@dataclass(frozen=True)
class Line:
    """Absolute relative errors of one source, ours and the rival's."""

    kind: str
    source: str
    rows: int
    mean: float
    median: float
    rival: float


def judge(whole: Evidence, physics: Callable[[Row], Physics]) -> list[Line]:
    """One line per kind and source; `physics` gives the numbers with which a row is priced."""
    lines = []
    kinds = (
        ("step time", whole.steps, step_ratios, half_of_peak, lambda r: r),
        ("speed-up", whole.speedups, speedup_ratios, linear, lambda p: p.row),
        ("memory", whole.memories, memory_ratios, states_only, lambda r: r),
    )
    for kind, items, ours, rival, row_of in kinds:
        everything: list[tuple[float, float, Row]] = []
        for source in dict.fromkeys(row_of(i).source for i in items):
            some = [i for i in items if row_of(i).source == source]
            error = np.abs(ours(some, physics(row_of(some[0]))) - 1)
            other = np.abs(rival(some) - 1)
            everything += [(e, o, row_of(i)) for e, o, i in zip(error, other, some, strict=True)]
            lines.append(Line(kind, source, len(some), error.mean(), float(np.median(error)), other.mean()))
        for name, counts in (("ALL", lambda r: True), ("ALL whose layout is stated", lambda r: r.layout_stated)):
            good = np.array([(e, o) for e, o, row in everything if not row.low_quality and counts(row)])
            mean, rivals = good.mean(axis=0)
            lines.append(Line(kind, name, len(good), mean, float(np.median(good[:, 0])), rivals))
    return lines


def write_rows(whole: Evidence, physics: Callable[[Row], Physics], path: Path) -> None:
    """A row for each judged figure: who measured what, what is planned, and what the source left to be filled in."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("id", "source", "model", "device", "kind", "unit", "measured", "planned", "ratio", "filled in"))
        for kind, unit, rows, ratios, measured in (
            ("step time", "s", whole.steps, step_ratios, lambda r: r.step_s),
            ("memory", "bytes", whole.memories, memory_ratios, lambda r: r.memory_bytes),
        ):
            for row in rows:
                ratio, device = float(ratios([row], physics(row))[0]), row.cluster.device.name if row.cluster else ""
                figures = (f"{measured(row):.6g}", f"{measured(row) * ratio:.6g}", f"{ratio:.3f}")
                table.writerow((row.id, row.source, row.model_name, device, kind, unit, *figures, " ".join(row.filled)))
        for pair in whole.speedups:
            row, ratio = pair.row, float(speedup_ratios([pair], physics(pair.row))[0])
            figures = (f"{pair.speedup:.6g}", f"{pair.speedup * ratio:.6g}", f"{ratio:.3f}")
            device = row.cluster.device.name if row.cluster else ""
            table.writerow((row.id, row.source, row.model_name, device, "speed-up", "×", *figures, ""))


def show(lines: Sequence[Line]) -> str:
    titles = {"step time": "50 % MFU", "speed-up": "linear", "memory": "states only"}
    out = []
    for kind, rival in titles.items():
        out += ["", f"{kind:<66} rows   mean  median  {rival}"]
        for line in (x for x in lines if x.kind == kind):
            name = line.source if len(line.source) <= 64 else "…" + line.source[-63:]
            out.append(f"{name:<66} {line.rows:4d} {line.mean:6.1%} {line.median:7.1%} {line.rival:8.1%}")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--by", choices=("family", "source"), default="family", help="what a fold leaves out")
    parser.add_argument("--shipped", action="store_true", help="price with physics.py instead of fitting")
    parser.add_argument("--fit", action="store_true", help="fit to all rows and print the numbers")
    parser.add_argument("--rows", type=Path, metavar="ROWS.csv", help="write every row with its source and its error")
    asked = parser.parse_args()
    if not asked.measurements.is_file():
        parser.error(f"{asked.measurements} is not a file; give a table with a row per result")
    whole = evidence(asked.measurements)
    priced_with: Callable[[Row], Physics]
    if asked.fit:
        found = fit(whole, rounds=40)
        for name in FITTED:
            row = PHYSICS_TABLE[name]
            print(f"{name:24s} {getattr(found, name):10.3g} {row['unit']:10s} {row['meaning']}")
        priced_with = lambda _: found  # noqa: E731
    elif asked.shipped:
        priced_with = lambda _: GPU_PHYSICS  # noqa: E731
    else:
        fits = left_out(whole, asked.by, lambda text: print(text, file=sys.stderr))
        priced_with = lambda row: fits[getattr(row, asked.by)]  # noqa: E731
    if asked.rows is not None:
        write_rows(whole, priced_with, asked.rows)
    print(show(judge(whole, priced_with)))


if __name__ == "__main__":
    main()
