"""The gate: what is worse than a baseline is named, and noise is not."""

import random
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.io.files import write_json
from paceline.measurement.baseline import Baseline, BaselineRow, compare_with_baseline, read_baseline
from results import expect_error

FILE = Path("baseline.json")


def row(rng=None, slower=1.0, noise=0.007, grown=0, loss=2.5):
    """Five repeats whose compute takes `slower` times as long, each with noise of its own."""
    draws = [1 + abs(rng.gauss(0, noise)) if rng else 1.0 for _ in range(5)]
    times = [0.08 * slower * draw for draw in draws]
    peaks = (10**9 + grown,) * 5
    return BaselineRow(tuple(t + 0.02 for t in times), tuple(times), (0.01,) * 5, (0.01,) * 5, peaks, (loss,) * 5)


def baseline(*rows, machine="H100", **request):
    rows = {f"{n} ranks": found for n, found in enumerate(rows, 1)}
    return Baseline(1, "run", machine, {"train.precision": "fp32", **request}, rows)


def test_slow_steps_are_found_and_unchanged_ones_are_not():
    rng, found = random.Random(0), {1.0: 0, 1.0625: 0}
    for slower in found:
        for _ in range(20):
            worse = compare_with_baseline(FILE, baseline(row(rng)), baseline(row(rng, slower)))
            assert all((one.term, one.cause) == ("step_s", "compute_s") for one in worse)
            found[slower] += bool(worse)
    assert found[1.0] <= 1
    assert found[1.0625] >= 18  # of compute: 5 % of the step


@pytest.mark.parametrize(
    ("changed", "term"),
    [
        ({"grown": 5 * 10**7}, "memory"),
        ({"loss": 2.5001}, "loss"),
        ({"loss": float("nan")}, "loss"),
        ({"grown": 10**6}, ""),
    ],
)
def test_memory_and_loss(changed, term):
    found = compare_with_baseline(FILE, baseline(row(), row()), baseline(row(), row(**changed)))
    assert [(one.label, one.term) for one in found] == ([("2 ranks", term)] if term else [])


@pytest.mark.parametrize(
    ("now", "key"),
    [
        (baseline(row(), machine="A100"), "--baseline"),
        (baseline(), "--baseline"),
        (baseline(row(), **{"train.precision": "bf16"}), "train.precision"),
    ],
)
def test_what_cannot_be_compared(now, key):
    with expect_error("conflict", key):
        compare_with_baseline(FILE, baseline(row()), now)


def test_a_file_comes_back_and_another_is_rejected(tmp_path):
    file = tmp_path / "baseline.json"
    write_json(file, asdict(baseline(row())))
    assert read_baseline(file) == baseline(row())
    file.write_text('{"format": 1, "rows": {}}')
    with expect_error("invalid-format"):
        read_baseline(file)
