"""Fit the laws of Amdahl, Gustafson and universal scalability to speed-ups, with bands.

With S the speed-up on n ranks:

    Amdahl      1/S = s + (1 - s)/n                   s: the share that does not divide (same batch on all ranks)
    Gustafson     S = s + (1 - s) n                   the same where the batch grows with the ranks
    universal   n/S = 1 + a (n - 1) + b n (n - 1)     a: what ranks queue for; b: what each pair of ranks costs

Each is linear in its unknowns, so a fit is exact. The band comes from fits to bootstrap samples of the repeats. A law
is fitted only to more points than it has unknowns, and shown only if it meets them.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from paceline.io.format import number

DRAWS = 400
LOW, HIGH = 0.1, 0.9
REACH = 4  # times the measured ranks
LEAST_NOISE = 0.01
MOST_ERROR = 0.15  # else a law is not shown
Points = Mapping[int, float]  # speed-up by ranks


class CurvePoint(NamedTuple):
    """A speed-up by the law, and the band of four in five bootstrap fits."""

    ranks: int
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class LawFit:
    law: str  # amdahl, gustafson or universal
    parameters: dict[str, float]
    error: float
    curve: tuple[CurvePoint, ...]
    ceiling_high: float | None = None  # of nine in ten bootstrap fits

    @property
    def name(self) -> str:
        return LAWS[self.law].name

    @property
    def description(self) -> str:
        return f"{self.name} ({', '.join(f'{name} {number(value, 3)}' for name, value in self.parameters.items())})"

    def beyond(self, ranks: int) -> CurvePoint | None:
        return next((point for point in self.curve if point.ranks >= ranks), None)


def parse_law_fit(values: Mapping[str, Any]) -> LawFit:
    curve = tuple(CurvePoint(*point) for point in values["curve"])
    return LawFit(values["law"], values["parameters"], values["error"], curve, values.get("ceiling_high"))


@dataclass(frozen=True)
class Law:
    name: str
    needs: int  # points beside one rank
    solve: Callable[[Points], dict[str, float]]
    speedup: Callable[[Mapping[str, float], float], float]


def _solve_serial(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the share s in [0, 1] that solves a·s = b best, over all pairs (a, b)."""
    square = sum(a * a for a, _ in pairs)
    return {"serial": min(1.0, max(0.0, sum(a * b for a, b in pairs) / square)) if square else 0.0}


def _solve_universal(points: Points) -> dict[str, float]:
    from scipy.optimize import nnls

    rows = [(s * (n - 1) / n, s * (n - 1), 1 - s / n) for n, s in points.items() if n > 1]
    (contention, crosstalk), _ = nnls([row[:2] for row in rows], [row[2] for row in rows])
    return {"contention": float(contention), "crosstalk": float(crosstalk)}


LAWS = {
    "amdahl": Law(
        "Amdahl",
        2,
        lambda points: _solve_serial([(s * (1 - 1 / n), 1 - s / n) for n, s in points.items() if n > 1]),
        lambda p, n: 1 / (p["serial"] + (1 - p["serial"]) / n),
    ),
    "gustafson": Law(
        "Gustafson",
        2,
        lambda points: _solve_serial([((1 - n) / s, 1 - n / s) for n, s in points.items() if n > 1]),
        lambda p, n: p["serial"] + (1 - p["serial"]) * n,
    ),
    "universal": Law(
        "universal scalability",
        3,
        _solve_universal,
        lambda p, n: n / (1 + p["contention"] * (n - 1) + p["crosstalk"] * n * (n - 1)),
    ),
}


def fit_laws(
    repeats: Mapping[int, Sequence[float]],
    weak: bool = False,
    middles: Mapping[int, float] | None = None,
    most: int | None = None,
) -> list[LawFit]:
    """Fit the laws that there are enough numbers of ranks for; `repeats` are speed-ups by number of ranks.

    A law is fitted to the `middles`, or without them to the medians; the repeats make the band. `most` is the number of
    ranks beyond which they would share cores, so that no law holds.
    """
    given = {n: kept for n, found in sorted(repeats.items()) if n > 1 and (kept := [s for s in found if s > 0])}
    names = ["gustafson" if weak else "amdahl", "universal"]
    points = {n: (middles or {}).get(n) or median(found) for n, found in given.items()}
    reach = REACH * max(points, default=1)
    reach = reach if most is None else max(*points, min(reach, most)) if points else 1
    found = [_fit_law(name, given, points, reach) for name in names if len(given) >= LAWS[name].needs]
    if most is not None:  # with more ranks than cores no ceiling is known
        found = [replace(law, ceiling_high=None) for law in found]
    return [law for law in found if law.error <= MOST_ERROR]


def _fit_law(name: str, repeats: Mapping[int, Sequence[float]], points: Points, reach: int) -> LawFit:
    law = LAWS[name]
    parameters = law.solve(points)
    dice = random.Random(0)
    drawn = [law.solve({n: _resample(found, dice) for n, found in repeats.items()}) for _ in range(DRAWS)]
    curve = []
    for n in list_rank_counts(reach):
        values = sorted(law.speedup(p, n) for p in drawn)
        middle = law.speedup(parameters, n)
        low, high = values[int(LOW * (DRAWS - 1))], values[int(HIGH * (DRAWS - 1))]
        curve.append(CurvePoint(n, middle, min(low, middle), max(high, middle)))
    error = max(abs(law.speedup(parameters, n) / s - 1) for n, s in points.items())
    ceilings = sorted(_find_ceiling(name, p) for p in drawn)
    high = max(ceilings[math.ceil(HIGH * (DRAWS - 1))], _find_ceiling(name, parameters))
    return LawFit(name, parameters, error, tuple(curve), high if math.isfinite(high) else None)


def _resample(found: Sequence[float], dice: random.Random) -> float:
    return median([dice.choice(found) for _ in found]) * math.exp(dice.gauss(0.0, LEAST_NOISE))


def _find_ceiling(name: str, p: Mapping[str, float]) -> float:
    """Return the speed-up that no number of ranks exceeds; infinite if there is none."""
    if p.get("crosstalk", 0.0) > 1e-9:
        peak_ranks = math.sqrt(max(1.0, (1 - p["contention"]) / p["crosstalk"]))
        return LAWS[name].speedup(p, peak_ranks)
    share = {"amdahl": p.get("serial"), "universal": p.get("contention")}.get(name) or 0.0
    return 1 / share if share > 1e-6 else math.inf


def list_rank_counts(most: int) -> list[int]:
    found, n = [], 1
    while n < most:
        found.append(n)
        n += max(1, n // 8)
    return [*found, most]
