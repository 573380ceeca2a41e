"""How often devices fail, how often to save a checkpoint for it, and how far the slowest of many lags."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from paceline.hardware.catalogue import Device
from paceline.io.arguments import option_error
from paceline.io.format import duration, number

RESTART_S = 660.0
"""From a failure to the next new step: the median of retries that a cluster of 504 B200 reports (11 min)."""
FALLBACK_MTBF_H = 29_500.0
FALLBACK_SOURCE = "that of an A100 in RSC-1, arXiv 2410.21680"
Z_BAND = 1.8  # standard deviations to either end: 90 % of the skewed sums that were simulated lie between
MOST_EXPONENT = 300.0
SMALL = 1e-4
MEAN_SHARE = 0.5264  # of draws, those below the mean of the largest of many normal deviates


@dataclass(frozen=True)
class FailureModel:
    """Failures of one device that end the whole run, as independent events at a constant rate."""

    mtbf_h: float = FALLBACK_MTBF_H
    restart_s: float = RESTART_S
    source: str = FALLBACK_SOURCE

    def rate(self, devices: int) -> float:
        """Return failures of the run per second."""
        return devices / (3600 * self.mtbf_h)


def resolve_failures(
    device: Device | None, mtbf_h: float | None = None, restart_s: float | None = None
) -> FailureModel:
    """Return the rates that were given, else the published ones of a device."""
    for option, value in (("--mtbf", mtbf_h), ("--restart", restart_s)):
        if value is not None and not 0 < value < math.inf:
            raise option_error(option, f"{value:g} is not possible; give more than 0")
    source = "given" if mtbf_h is not None else (device and device.mtbf_from) or FALLBACK_SOURCE
    return FailureModel(mtbf_h or (device and device.mtbf_h) or FALLBACK_MTBF_H, restart_s or RESTART_S, source)


def find_best_interval_s(save_s: float, rate: float) -> float:
    """Return the work between checkpoints that loses least (Young, Daly): √(2 × save / rate)."""
    return math.sqrt(2 * save_s / rate)


def describe_interval(steps: int, save_s: float, mtbf_h: float, devices: int, step_s: float) -> str:
    """Print the interval as the equation that it comes from."""
    failing = f"{number(mtbf_h)} h" + f" / {devices:,}" * (devices > 1)
    return f"{steps:,} step{'s' * (steps > 1)} = √(2 × {duration(save_s)} × {failing}) / {duration(step_s)}"


def find_slowest(count: int, share: float = MEAN_SHARE) -> float:
    """Return the quantile (by default, about the mean) of the largest of `count` standard normal deviates."""
    return NormalDist().inv_cdf(share ** (1 / count))


@dataclass(frozen=True)
class ExpectedRun:
    """A run with its failures. `interval_s` is the work between two checkpoints."""

    interval_s: float
    best_interval_s: float
    hours: float
    hours_band: tuple[float, float]
    failures: float
    goodput: float  # share of the hours that makes progress


def expect_run(
    model: FailureModel,
    devices: int,
    work_s: float,
    save_s: float,
    interval_s: float | None = None,
    spread: float = 0.0,
) -> ExpectedRun:
    """Compute the hours of `work_s` with a pause of `save_s` after each `interval_s`, or after the best interval.

    A failure loses what was done since the last checkpoint, and then a restart, which may fail too. The time of a
    segment between checkpoints has a closed mean and variance; over many segments the lost time is close to a gamma
    distribution. The times of devices for the same work deviate by `spread`, and all keep the pace of the slowest: of
    an ordinary one in `work_s`, of a lucky or unlucky draw of devices at the ends of the band.
    """
    rate = model.rate(devices)
    best_s = min(work_s, find_best_interval_s(save_s, rate))
    interval_s = min(work_s, interval_s or best_s)
    segments, segment_s = work_s / interval_s, interval_s + save_s
    restart_s, restart_var = _repeat_until_done(rate, model.restart_s)
    growth = math.expm1(min(rate * segment_s, MOST_EXPONENT))  # failures per segment, mean of a geometric distribution
    kept = 1 / (1 + growth)
    lost_s, lost_var = _time_to_failure(rate, segment_s)
    failures = segments * growth
    extra_s = failures * (lost_s + restart_s)
    variance = segments * (growth * (lost_var + restart_var) + growth / kept * (lost_s + restart_s) ** 2)
    base_s = work_s + segments * save_s
    low, high = (base_s + _gamma_quantile(extra_s, variance, z) for z in (-Z_BAND, Z_BAND))
    total_s = base_s + extra_s
    usual = find_slowest(devices)
    early_s, late_s = (work_s * spread * (find_slowest(devices, share) - usual) for share in (0.05, 0.95))
    low, high = total_s - math.hypot(total_s - low, early_s), total_s + math.hypot(high - total_s, late_s)
    return ExpectedRun(interval_s, best_s, total_s / 3600, (low / 3600, high / 3600), failures, work_s / total_s)


def _time_to_failure(rate: float, within_s: float) -> tuple[float, float]:
    """Return mean and variance of the time of a failure that happens within a time."""
    if rate * within_s < SMALL:  # evenly spread; the formulas below would lose all digits
        return within_s / 2, within_s**2 / 12
    growth = math.expm1(min(rate * within_s, MOST_EXPONENT))
    mean = 1 / rate - within_s / growth
    square = 2 / rate**2 - (within_s**2 + 2 * within_s / rate) / growth
    return mean, max(0.0, square - mean**2)


def _repeat_until_done(rate: float, seconds: float) -> tuple[float, float]:
    """Return mean and variance of the time that something takes if each failure starts it again."""
    x = min(rate * seconds, MOST_EXPONENT)
    return math.expm1(x) / rate, max(0.0, math.exp(2 * x) - 2 * x * math.exp(x) - 1) / rate**2


def _gamma_quantile(mean: float, variance: float, z: float) -> float:
    """Return the quantile of a gamma distribution at a normal deviate (Wilson, Hilferty)."""
    if mean <= 0 or variance <= 0:
        return mean
    shape = mean**2 / variance
    return mean * max(0.0, 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3
