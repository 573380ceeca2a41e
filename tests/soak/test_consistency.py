"""The same as tests/unit/reports/test_consistency.py, for 300 run files: through plan, measure and report."""

from hypothesis import HealthCheck, given, settings

from consistency import check_measurement, measurements
from plan_consistency import QUESTIONS, check_plan

MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@given(measurements())
@MANY
def test_measurements(tmp_path, made):
    check_measurement(tmp_path, made)


@given(QUESTIONS)
@MANY
def test_plans(asked):
    check_plan(asked)
