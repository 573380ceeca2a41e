"""No sentence has a number that its tables lack, and none denies another: over measurements made up at random."""

from hypothesis import HealthCheck, given, settings

from consistency import check_measurement, measurements


@given(measurements())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_measurement_says_is_in_its_tables(tmp_path, made):
    check_measurement(tmp_path, made)
