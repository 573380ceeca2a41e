"""Measure how accurate plans are for people whose rows were left out: means, medians, bands and wrong verdicts.

    python benchmarks/plan_bands.py MEASUREMENTS.csv                       # print all of it; ten minutes
    python benchmarks/plan_bands.py MEASUREMENTS.csv --fits FITS.json      # keeps the fits, for seconds next time
    python benchmarks/plan_bands.py MEASUREMENTS.csv --write   # writes planner/bands.csv and docs/plan_accuracy.md

Every row is priced with constants that were fitted to all other families (groups of people). A band is a pair of
quantiles of measured / planned over rows (split conformal). It is judged on each family in turn, by the band that the
other families give. A situation (how work is spread) has its own band if nine in ten of its left-out rows lie inside
and it is not much wider than that of all rows; else it has that one. What no row tells about has the widest of all.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from plan_published import (
    Evidence,
    evidence,
    judge,
    left_out,
    memory_ratios,
    speedup_ratios,
    step_ratios,
)
from published_rows import Row

from paceline.planner.candidates import ALL, BANDS_FILE, UNKNOWN, Band, name_situation
from paceline.planner.formulas.placement import GPU_PHYSICS, Physics

LEVELS = {"memory": (0.01, 0.97), "time": (0.03, 0.97)}
"""Of the two ends. The lower end of memory says "does not fit", which nobody tries: nearly all rows must lie above."""
ENOUGH_ROWS, ENOUGH_COVERAGE, WIDEST = 10, 0.9, 1.1
OTHER_MODULES = {"memory": 1.47, "time": 1.47}
"""Measured / planned of our own runs of other modules, all but the worst (docs/plan_accuracy.md, under One H200)."""
DEVICES_GB = (11, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192)
PAGE = Path(__file__).parents[1] / "docs" / "plan_accuracy.md"
NAMES = {
    "foundry": "llm-foundry",
    "torchao": "torchao",
    "titan": "torchtitan",
    "megatron": "Megatron-LM",
    "nemo": "NeMo",
    "dgxc": "DGX Cloud benchmarks",
    "dle": "NVIDIA DeepLearningExamples",
    "dlperf": "OneFlow DLPerf",
    "bloom": "BLOOM, A100",
    "bloomv": "BLOOM, V100",
    "hf": "Hugging Face",
    "lambda": "Lambda",
    "llama": "Llama 3 paper",
    "misc": "LLaMA, TinyLlama",
    "vtrainM": "vTrain, many nodes",
    "vtrainS": "vTrain, one node",
    "tf": "TensorFlow 2017",
    "horovod": "Horovod",
    "smallmlp": "blogs (low quality)",
    "colossal": "ColossalAI (low quality)",
}
NEAR = 2.0
"""Devices with up to so many times more or less memory than was measured are asked about."""


@dataclass(frozen=True)
class Judged:
    """Rows of one quantity, with measured / planned where their family was left out of the fit."""

    quantity: str
    rows: Sequence[Row]
    ratios: np.ndarray

    def situations(self) -> np.ndarray:
        kinds = ((r.placement.pipeline, r.placement.tensor, r.placement.zero, r.placement.ranks) for r in self.rows)
        return np.array([name_situation(*kind) for kind in kinds])

    def families(self) -> np.ndarray:
        return np.array([r.family for r in self.rows])

    def limits(self, chosen: np.ndarray) -> tuple[float, float]:
        """Return the quantiles of some rows, as one more row would need them."""
        ordered, n = np.sort(self.ratios[chosen]), int(chosen.sum())
        low, high = LEVELS[self.quantity]
        return ordered[max(0, math.floor((n + 1) * low) - 1)], ordered[min(n, math.ceil((n + 1) * high)) - 1]

    def left_out_limits(self, situation: str | None) -> np.ndarray:
        """Return the band of each row from the other families' rows, of its situation or of all; NaN if too few."""
        families, found = self.families(), np.full((len(self.rows), 2), np.nan)
        usable = self.situations() == situation if situation else np.ones(len(self.rows), bool)
        for family in set(families[usable]):
            others = usable & (families != family)
            if others.sum() >= ENOUGH_ROWS:
                found[usable & (families == family)] = self.limits(others)
        return found


def judge_rows(whole: Evidence, fits: dict[str, Physics]) -> list[Judged]:
    kinds = (("memory", whole.memories, memory_ratios), ("time", whole.steps, step_ratios))
    found = []
    for quantity, rows, ratios in kinds:
        good = [r for r in rows if not r.low_quality]
        found.append(Judged(quantity, good, np.array([1 / ratios([r], fits[r.family])[0] for r in good])))
    return found


def covers(judged: Judged, limits: np.ndarray) -> np.ndarray:
    return (limits[:, 0] <= judged.ratios) & (judged.ratios <= limits[:, 1])


def find_bands(judged: Judged) -> tuple[list[Band], np.ndarray]:
    """Return the bands of all situations, and for each row the one that it had while its family was left out."""
    kinds, families, everything = judged.situations(), judged.families(), judged.left_out_limits(None)
    used, bands = everything.copy(), []
    for situation in sorted(set(kinds)):
        here, own = kinds == situation, judged.left_out_limits(situation)
        limits = judged.limits(np.ones(len(kinds), bool))
        if np.isfinite(own[here]).all() and covers(judged, own)[here].mean() >= ENOUGH_COVERAGE:
            low, high = judged.limits(here)
            if high / low < WIDEST * limits[1] / limits[0]:
                used[here], limits = own[here], (low, high)
        inside = covers(judged, used)[here].mean()
        bands.append(Band(judged.quantity, situation, *limits, int(here.sum()), len(set(families[here])), inside))
    whole = np.ones(len(kinds), bool)
    inside = covers(judged, everything).mean()
    bands.append(Band(judged.quantity, ALL, *judged.limits(whole), len(kinds), len(set(families)), inside))
    low, high = min(b.low for b in bands), max(*(b.high for b in bands), OTHER_MODULES[judged.quantity])
    bands.append(Band(judged.quantity, UNKNOWN, low, high, 0, 0, math.nan))
    return bands, used


def count_wrong_verdicts(judged: Judged, limits: np.ndarray) -> dict[str, float]:
    """Ask of every row whether it fits on each device size near what it took, and count the verdicts."""
    counts = dict.fromkeys(("asked", "false fits", "false does not fit", "may not fit"), 0)
    for row, ratio, (low, high) in zip(judged.rows, judged.ratios, limits, strict=True):
        measured = row.memory_bytes or math.nan
        planned = measured / ratio
        for capacity in (gb * 1e9 for gb in DEVICES_GB if 1 / NEAR <= gb * 1e9 / measured <= NEAR):
            counts["asked"] += 1
            counts["false fits"] += planned * high <= capacity < measured
            counts["false does not fit"] += measured <= capacity < planned * low
            counts["may not fit"] += planned * low <= capacity < planned * high
    return {name: count if name == "asked" else count / counts["asked"] for name, count in counts.items()}


def show(judged: Judged, bands: Sequence[Band], used: np.ndarray) -> None:
    above, inside = (judged.ratios > used[:, 1]).mean(), covers(judged, used)
    families = judged.families()
    by_family = np.mean([inside[families == family].mean() for family in set(families)])
    print(f"\n{judged.quantity}: {inside.mean():.1%} of {len(inside)} left-out rows inside, {above:.1%} above", end="")
    print(f"; {by_family:.1%} where every family counts the same")
    for band in bands:
        measured = f"{band.rows:5d} rows, {band.families:2d} families, {band.coverage:6.1%} inside" if band.rows else ""
        print(f"  {band.situation:12s} {band.low:5.2f} to {band.high:5.2f}  {measured}")


def describe_error(ratios: np.ndarray) -> str:
    """Return mean and median of relative errors, and their number."""
    error = np.abs(ratios - 1)
    return f"{100 * error.mean():.0f} / {100 * np.median(error):.0f} % ({len(error)})"


def build_family_table(whole: Evidence, fits: dict[str, Physics], found: list[tuple[Judged, np.ndarray]]) -> str:
    """Tabulate each family as it was priced without it: errors, and the share of rows inside the band."""
    lines = ["| group | step time | speed-up | memory |", "|---|---|---|---|"]
    bands = {judged.quantity: (judged, used) for judged, used in found}

    def cell(quantity: str, rows: Sequence, ratios, family: str) -> str:
        if not rows:
            return ""
        error = describe_error(ratios(rows, fits[family]))
        if quantity not in bands:
            return error
        judged, used = bands[quantity]
        inside = covers(judged, used)[judged.families() == family]
        return f"{error}, {100 * inside.mean():.0f} %" if len(inside) else error

    for family, name in NAMES.items():
        part = whole.where(lambda row, family=family: row.family == family)
        cells = (
            cell("time", part.steps, step_ratios, family),
            cell("speed-up", part.speedups, speedup_ratios, family),
            cell("memory", part.memories, memory_ratios, family),
        )
        lines.append(f"| {' | '.join((name, *cells))} |")
    return "\n".join(lines)


def build_total_table(whole: Evidence, fits: dict[str, Physics]) -> str:
    left_out_lines, shipped = judge(whole, lambda row: fits[row.family]), judge(whole, lambda _: GPU_PHYSICS)
    rows = (
        ("all but the tables of the same group", left_out_lines, "ALL"),
        ("the same, for rows whose sources state the layout", left_out_lines, "ALL whose layout is stated"),
        ("the constants that are shipped: all rows but those of torchtitan", shipped, "ALL"),
    )
    lines = ["| constants fitted to | step time | speed-up | memory |", "|---|---|---|---|"]
    for words, found, source in rows:
        each = {line.kind: line for line in found if line.source == source}
        cells = (f"{100 * line.mean:.1f} / {100 * line.median:.1f} % ({line.rows:,})" for line in each.values())
        lines.append(f"| {words} | {' | '.join(cells)} |")
    rivals = [f"{100 * line.rival:.1f} %" for line in shipped if line.source == "ALL"]
    lines.append(f"| the rule of thumb: 50 % MFU, linear, states only | {' | '.join(rivals)} |")
    return "\n".join(lines)


def build_band_table(found: list[tuple[Judged, np.ndarray]], every: list[Band]) -> str:
    lines = [
        "| | band | left-out rows inside | above it | inside, each group counting the same |",
        "|---|---|---|---|---|",
    ]
    for judged, used in found:
        bands = [band for band in every if band.quantity == judged.quantity and band.rows]
        whole, inside, families = bands[-1], covers(judged, used), judged.families()
        widths = f"{whole.low:.2f} to {whole.high:.2f}"
        low, high = min(b.low for b in bands), max(b.high for b in bands)
        if (low, high) != (whole.low, whole.high):
            widths += f"; by situation {low:.2f} to {high:.2f}"
        same = 100 * np.mean([inside[families == family].mean() for family in set(families)])
        above = 100 * (judged.ratios > used[:, 1]).mean()
        rows = f"{judged.quantity}, {len(inside):,} rows of {len(set(families))} groups"
        lines.append(f"| {rows} | {widths} | {100 * inside.mean():.1f} % | {above:.1f} % | {same:.1f} % |")
    judged, used = found[0]
    asked, plain = np.tile([1 / 1.13, 1.13], (len(judged.rows), 1)), np.ones((len(judged.rows), 2))
    counts = {"with the band": used, "with ± 13 %": asked, "the estimate alone": plain}
    names = ("false fits", "false does not fit", "may not fit")
    lines += ["", '| | false "fits" | false "does not fit" | "may not fit" |', "|---|---|---|---|"]
    for words, limits in counts.items():
        wrong = count_wrong_verdicts(judged, limits)
        lines.append(f"| {words} | {' | '.join(f'{100 * wrong[name]:.1f} %' for name in names)} |")
    return "\n".join(lines)


def write_page(tables: dict[str, str]) -> None:
    """Put the tables between their marks in docs/plan_accuracy.md."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        mark = f"<!-- {name}: by benchmarks/plan_bands.py -->"
        assert text.count(mark) == 2, f"{PAGE} has no two marks {mark}"
        before, _, after = text.split(mark)
        text = f"{before}{mark}\n{table}\n{mark}{after}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--fits", type=Path, help="constants with each family left out: read if there, else written")
    parser.add_argument("--write", action="store_true", help=f"write {BANDS_FILE.name} and {PAGE.name}")
    asked = parser.parse_args()
    whole = evidence(asked.measurements)
    if asked.fits is not None and asked.fits.is_file():
        fits = {name: Physics(**values) for name, values in json.loads(asked.fits.read_text()).items()}
    else:
        fits = left_out(whole, "family", lambda text: print(text, file=sys.stderr))
        if asked.fits is not None:
            asked.fits.write_text(json.dumps({name: asdict(physics) for name, physics in fits.items()}))
    every: list[Band] = []
    results: list[tuple[Judged, np.ndarray]] = []
    for judged in judge_rows(whole, fits):
        bands, used = find_bands(judged)
        every += bands
        results.append((judged, used))
        show(judged, bands, used)
    tables = {"totals": build_total_table(whole, fits)}
    tables |= {"groups": build_family_table(whole, fits, results), "bands": build_band_table(results, every)}
    print("", *tables.values(), sep="\n")
    if asked.write:
        write_page(tables)
        with BANDS_FILE.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(Band.__dataclass_fields__)
            table.writerows([f"{v:.3f}" if isinstance(v, float) else v for v in asdict(b).values()] for b in every)


if __name__ == "__main__":
    main()
