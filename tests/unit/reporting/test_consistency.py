"""No sentence has a number that its tables lack, and none denies another: over measurements made up at random."""

from hypothesis import HealthCheck, given, settings

from consistency import CLUSTERS, check_measurement, check_plan, measurements, run_files


@given(measurements())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_measurement_says_is_in_its_tables(tmp_path, made):
    check_measurement(tmp_path, made)


@given(run_files(), CLUSTERS)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_what_a_plan_says_is_of_the_row_it_marks(values, cluster):
    check_plan(values, cluster)
