"""The laws of scaling find the parameters that made the numbers, and say how sure they are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.measurement.scaling_laws import fit_laws


def amdahl(s, n):
    return 1 / (s + (1 - s) / n)


def universal(a, b, n):
    return n / (1 + a * (n - 1) + b * n * (n - 1))


@pytest.mark.parametrize("serial", [0.0, 0.05, 0.3, 1.0])
def test_amdahl_is_recovered(serial):
    (fit, _) = fit_laws({n: [amdahl(serial, n)] for n in (1, 2, 4, 8)})
    assert fit.law == "amdahl"
    assert fit.parameters["serial"] == pytest.approx(serial, abs=1e-9)
    assert fit.error < 1e-9
    assert fit.ceiling_high is None or fit.ceiling_high >= 1 / serial - 1e-9


@pytest.mark.parametrize(("a", "b"), [(0.02, 0.001), (0.3, 0.0), (0.0, 0.05), (1.6, 0.24)])
def test_universal_scalability_is_recovered(a, b):
    fit = fit_laws({n: [universal(a, b, n)] for n in (1, 2, 4, 8)})[-1]
    assert fit.law == "universal"
    assert fit.parameters["contention"] == pytest.approx(a, abs=1e-6)
    assert fit.parameters["crosstalk"] == pytest.approx(b, abs=1e-6)
    assert fit.beyond(16).speedup == pytest.approx(universal(a, b, 16))


@pytest.mark.parametrize(
    ("points", "laws"),
    [
        ({1: [1.0], 2: [1.7], 4: [2.7]}, ["amdahl"]),
        ({1: [1.0], 2: [1.9], 4: [3.7], "weak": True}, ["gustafson"]),
        *(({1: [1.0], 2: [1.7]}, []), ({1: [1.0]}, []), ({}, [])),  # fewer points than unknowns
        *(({2: [6.67], 4: [9.0]}, []), ({2: [0.33], 4: [1.0]}, [])),  # no law meets them
    ],
)
def test_a_law_has_enough_points_and_meets_them(points, laws):
    weak = points.pop("weak", False)
    found = fit_laws(points, weak)
    assert [fit.law for fit in found] == laws
    assert not weak or found[0].parameters["serial"] == pytest.approx(0.1)


def test_no_law_holds_where_ranks_share_cores():
    fit = fit_laws({2: [1.8], 4: [3.0]}, most=6)[0]
    assert fit.curve[-1].ranks == 6
    assert fit.beyond(8) is None
    assert fit.ceiling_high is None
    assert fit_laws({2: [1.8], 4: [3.0]}, most=2)[0].curve[-1].ranks == 4, "what was measured is shown"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(0.2, 9), min_size=1, max_size=4), min_size=2, max_size=4))
def test_no_band_goes_beyond_the_ceiling(speedups):
    for fit in fit_laws({2 << i: found for i, found in enumerate(speedups)}):
        if fit.ceiling_high is not None:
            assert max(point.high for point in fit.curve) <= fit.ceiling_high * (1 + 1e-9)


def test_the_band_widens_with_the_spread_and_with_the_distance():
    calm = fit_laws({2: [1.8, 1.81, 1.79], 4: [3.0, 3.01, 2.99]})[0]
    noisy = fit_laws({2: [1.5, 1.8, 1.95], 4: [2.2, 3.0, 3.5]})[0]

    def width(fit, n):
        _, middle, low, high = next(point for point in fit.curve if point[0] >= n)
        assert low <= middle <= high
        return (high - low) / middle

    assert width(noisy, 16) > 2 * width(calm, 16)
    assert width(noisy, 16) > width(noisy, 2)
    assert calm.curve[-1].ranks == 16, "four times as far"
