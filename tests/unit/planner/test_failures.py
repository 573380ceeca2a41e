"""Expected hours of a run that fails: the formula against a simulation, and the interval that loses least."""

import random
import statistics
from time import perf_counter

import pytest

import paceline
from paceline.hardware.catalogue import find_device
from paceline.hardware.failures import FailureModel, expect_run, find_best_interval_s, find_slowest, resolve_failures
from plan_specs import lm

MONTH_S = 30 * 86400.0


def simulate_run(rng, rate, restart_s, work_s, save_s, interval_s):
    """Play a run failure by failure; return its seconds."""
    clock, done, failure = 0.0, 0.0, rng.expovariate(rate)
    while done < work_s:
        segment = min(interval_s, work_s - done) + save_s
        if clock + segment <= failure:
            clock, done = clock + segment, done + segment - save_s
            continue
        clock = failure
        while True:  # a restart may fail too
            failure = clock + rng.expovariate(rate)
            if clock + restart_s <= failure:
                break
            clock = failure
        clock += restart_s
    return clock


@pytest.mark.parametrize(
    ("devices", "mtbf_h", "save_s", "interval_s", "spread"),
    [
        (1024, 50_700, 12.0, None, 0.0),
        (1024, 50_700, 12.0, 4 * 3600.0, 0.0),
        (16_384, 50_700, 5.0, None, 0.0),
        (100_000, 50_700, 2.0, None, 0.0),
        (1024, 50_700, 12.0, None, 0.012),
        (1024, 1e9, 12.0, None, 0.012),
    ],
)
def test_a_month_with_failures(devices, mtbf_h, save_s, interval_s, spread):
    """All devices keep the pace of the slowest; where few fail, their spread makes the band."""
    model, rng = FailureModel(mtbf_h, restart_s=300.0), random.Random(0)
    found = expect_run(model, devices, MONTH_S, save_s, interval_s, spread)
    hours = []
    for _ in range(200):
        lag = max(rng.gauss(0, 1) for _ in range(devices)) - find_slowest(devices) if spread else 0.0
        work_s = MONTH_S * (1 + spread * lag)
        hours.append(simulate_run(rng, model.rate(devices), 300.0, work_s, save_s, found.interval_s) / 3600)
    low, high = found.hours_band
    assert statistics.fmean(hours) == pytest.approx(found.hours, rel=0.01)
    assert 175 <= sum(low <= h <= high for h in hours) < (200 if spread else 201)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_the_slowest_of_many_ranks_lags_as_far_as_drawn(ranks):
    rng = random.Random(0)
    draws = sorted(max(rng.gauss(0, 1) for _ in range(ranks)) for _ in range(2000 if ranks < 100 else 400))
    assert statistics.fmean(draws) == pytest.approx(find_slowest(ranks), abs=0.06)
    assert find_slowest(ranks, 0.95) == pytest.approx(draws[int(0.95 * len(draws))], abs=0.2)


def test_no_other_interval_loses_less():
    model = FailureModel(50_700, restart_s=300.0)
    best_s = find_best_interval_s(12.0, model.rate(1024))
    hours = [expect_run(model, 1024, MONTH_S, 12.0, best_s * times).hours for times in (1.0, 0.5, 0.7, 1.4, 2.0)]
    assert hours[0] == min(hours)


def test_rates_come_from_the_catalogue_or_the_user():
    assert resolve_failures(find_device("H100")).mtbf_h == 50_700
    assert resolve_failures(find_device("T4")).mtbf_h == resolve_failures(find_device("A100")).mtbf_h
    assert resolve_failures(find_device("H100"), 100.0, 60.0) == FailureModel(100.0, 60.0, "given")


def test_the_plan_of_100_000_devices_has_its_failures():
    began = perf_counter()
    plan = paceline.plan(lm("7b", 100_000, train={"steps": 20_000}), "12500x8xH100", [100_000])
    assert perf_counter() - began < 10
    (row,) = plan.as_json()["rows"]
    expected = row["expected"]
    assert expected["failures"] > 0.1
    assert expected["hours_band"][0] <= expected["hours"] <= expected["hours_band"][1]
    assert expected["hours"] > 0.99 * row["hours"]
