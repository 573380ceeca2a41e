"""What a measurement or a plan says follows from its own rows: over measurements and questions made up at random."""

from hypothesis import HealthCheck, given, settings

from consistency import check_measurement, measurements
from plan_consistency import QUESTIONS, check_plan


@given(measurements())
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_measurement_says_is_in_its_tables(tmp_path, made):
    check_measurement(tmp_path, made)


@given(QUESTIONS)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_what_a_plan_says_is_of_the_row_it_marks(asked):
    check_plan(asked)
