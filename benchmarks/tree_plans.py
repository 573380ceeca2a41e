"""The part `plan` of benchmarks/trees.py: what a round was planned to take, and what it takes."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

import paceline
from paceline.config import RunSpec, build_spec
from paceline.planner.cost_model import split_rows
from paceline.planner.target import resolve_target
from paceline.runlog.events import read_events
from paceline.runlog.run_dir import RunDir
from paceline.workloads.trees import planning

FITTED = [
    *((5_000, 8, 9), (5_000, 24, 3), (12_000, 40, 5), (20_000, 72, 6), (20_000, 12, 9), (45_000, 16, 8)),
    *((80_000, 8, 3), (80_000, 24, 6), (80_000, 24, 9), (80_000, 96, 4), (150_000, 12, 4), (150_000, 48, 7)),
    *((300_000, 8, 6), (300_000, 24, 3), (300_000, 24, 9), (500_000, 10, 5), (600_000, 20, 8), (900_000, 8, 7)),
]
"""Rows, columns and levels of the tables that prices are found from."""
UNSEEN = [
    *((8_000, 30, 6), (30_000, 20, 7), (100_000, 10, 8), (120_000, 60, 5), (400_000, 15, 4), (700_000, 12, 6)),
    *((10_000, 16, 8), (25_000, 64, 4), (70_000, 14, 9), (180_000, 28, 5), (350_000, 10, 7), (650_000, 16, 5)),
]
CACHES = [megabytes * 1e6 for megabytes in range(1, 25)]
"""Sizes that are tried as `CACHE_BYTES`."""
ROUNDS, FIRST = 14, 4
"""Rounds of a run, and how many of them come before the trees are as large as they get."""


def plan(asked: argparse.Namespace, folder: Path) -> None:
    """On one rank with all threads of this machine, on made-up tables; the least of turns over all of them, since what
    else a machine does only adds to them."""
    sizes = [*(FITTED if asked.fit else []), *UNSEEN]
    turns = [{size: _measured(size, folder / str(turn)) for size in sizes} for turn in range(asked.turns)]
    found = {size: (turns[0][size][0], min(turn[size][1] for turn in turns)) for size in sizes}
    if asked.fit:
        _, planning.CACHE_BYTES = min((_fitted(found, cache)[1], cache) for cache in CACHES)
        (*prices, planning.LEVEL_S), _ = _fitted(found, planning.CACHE_BYTES)
        planning.OPERATION_FLOPS.update(zip(planning.OPERATION_FLOPS, prices, strict=True))
        print("PRICES =", {name: round(price, 1) for name, price in planning.OPERATION_FLOPS.items()})
        print(f"LEVEL_S = {planning.LEVEL_S:.2g}, CACHE_BYTES = {planning.CACHE_BYTES:.2g}")
    for size, (_, seconds) in found.items():
        rows, columns, levels = size
        ratio = _planned(found[size][0]) / seconds
        kind = "fitted" if asked.fit and size in FITTED else "unseen"
        print(f"{rows:>9,} rows × {columns:>3} columns, {levels} levels: {1e3 * seconds:7.2f} ms, {ratio:.2f} ({kind})")
    off = [abs(_planned(found[size][0]) / found[size][1] - 1) for size in UNSEEN]
    print(f"unseen: {sum(o <= 0.2 for o in off)} of {len(off)} within 20 %, the farthest off by {max(off):.0%}")


def _measured(size: tuple[int, int, int], folder: Path) -> tuple[RunSpec, float]:
    """The run, and the median of its later rounds without those that say their loss."""
    rows, columns, levels = size
    data = {"rows": int(rows / 0.98), "columns": columns, "test_fraction": 0.02, "cache": str(folder.parent / "cache")}
    values = {"name": f"{rows}-{columns}-{levels}", "workload": "trees", "data": data}
    train = {"steps": ROUNDS, "evaluate_every": ROUNDS}
    spec = build_spec({**values, "model": {"max_depth": levels}, "train": train, "parallel": {"device": "cpu"}})
    run = paceline.train(spec, folder / "runs", show=False)
    steps = [event for event in read_events(RunDir(run.path).events_file(0), "step") if event["step"] > FIRST]
    return spec, statistics.median(event["step_s"] for event in steps if "loss" not in event)


def _planned(spec: RunSpec) -> float:
    subject = planning.build_trees_cost_model(spec, None, None)
    return float(subject.price(split_rows(subject.grown.rows, 1), resolve_target("local").at(1)).time.step_s)


def _fitted(found: dict[tuple[int, int, int], tuple[RunSpec, float]], cache: float) -> tuple[list[float], float]:
    """With a cache of so many bytes: the prices and, last, the seconds of a level, none below 0, that come closest to
    the measured times as ratios; and how far they are off."""
    from scipy.optimize import nnls

    plain = resolve_target("local").at(1).cluster.device.peak_flops_s("fp32")
    planning.CACHE_BYTES = cache
    lines = []
    for size in FITTED:
        spec, seconds = found[size]
        grown = planning.build_trees_cost_model(spec, None, None).grown
        counts = [count / plain for count in grown.operations(grown.rows).values()]
        lines.append([count / seconds for count in (*counts, grown.starts)])
    ratios, weights = np.array(lines), np.ones(len(lines))
    for _ in range(20):  # sums of distances, not of their squares: a table of a bad minute counts little
        prices, _ = nnls(ratios * weights[:, None], weights)
        off = np.abs(ratios @ prices - 1)
        weights = 1 / np.sqrt(np.maximum(off, 0.02))
    return [float(price) for price in prices], float(off.sum())
