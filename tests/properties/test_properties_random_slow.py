"""Generated models of several parts at random: every answer is that of a second route, also at as
many rows as some size.

As `test_properties_slow.py`, which has each part by itself. `make models` takes more of them.
"""

import os

import pytest
from generated_properties import (  # noqa: F401
    _compiling_is_most_of_the_time,
    _few_compiled_functions,
    _seen,
    in_turn,
    test_a_rows_answers_do_not_depend_on_the_number_the_order_and_the_values_of_other_rows,
    test_evidence_and_posterior_of_f_are_those_of_a_second_route,
    test_log_densities_integrate_all_entries_of_a_row_on_a_fine_grid,
    test_predictions_integrate_the_likelihood_over_f_on_a_fine_grid,
)
from model_generator import is_model, random_specs
from test_properties_slow import PARTS

pytestmark = pytest.mark.slow

_NUM, _SEED = (
    int(os.environ.get(k, x)) for k, x in {"PPL_GP_MODELS": 60, "PPL_GP_SEED": 0}.items()
)
SPECS = in_turn(random_specs(_NUM, _SEED))


@pytest.fixture(scope="module", params=SPECS, ids=str)
def spec(request):
    return request.param


def test_there_are_two_hundred_models_and_all_are_models():
    assert len({str(s) for s in (*PARTS, *SPECS)}) >= 200
    assert all(map(is_model, SPECS))
