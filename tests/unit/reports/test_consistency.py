"""What a measurement or a plan says follows from its own rows: over measurements and questions made up at random.

EXAMPLES=300 in the environment tries other and more of them.
"""

import os

from hypothesis import HealthCheck, given, settings

from consistency import check_measurement, measurements
from plan_consistency import QUESTIONS, check_plan

EXAMPLES = int(os.environ.get("EXAMPLES", 0))
MADE_UP = {
    "deadline": None,
    "derandomize": not EXAMPLES,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
}


@given(measurements())
@settings(max_examples=EXAMPLES or 8, **MADE_UP)
def test_what_a_measurement_says_is_in_its_tables(tmp_path, made):
    check_measurement(tmp_path, made)


@given(QUESTIONS)
@settings(max_examples=EXAMPLES or 15, **MADE_UP)
def test_what_a_plan_says_is_of_the_row_it_marks(asked):
    check_plan(asked)
