"""What is asked of every generated model of a file: imported by the slow files, which have a
fixture `spec` each.

Two files, so that two processes share them.
"""

from dataclasses import replace

import jax
import property_checks as check
import pytest
from model_generator import Spec


def in_turn(specs: list[Spec]) -> list[Spec]:
    """The specs, each asked at a number of rows that is no size of the model, and at one of its
    sizes, all of them in turn.
    """
    return [
        replace(s, rows=(check.neutral(s), s.sizes[i % len(s.sizes)])) for i, s in enumerate(specs)
    ]


@pytest.fixture(scope="module", autouse=True)
def _compiling_is_most_of_the_time():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def _seen():
    return []


@pytest.fixture(autouse=True)
def _few_compiled_functions(request, _seen):
    """Linux bounds the maps of memory of a process, and XLA holds some for each function: forget
    them now and then.
    """
    yield
    if "spec" in request.fixturenames and (spec := request.getfixturevalue("spec")) not in _seen:
        _seen.append(spec)
        if len(_seen) % 20 == 0:
            jax.clear_caches()


def test_evidence_and_posterior_of_f_are_those_of_a_second_route(spec):
    check.check_posterior(spec)


def test_predictions_integrate_the_likelihood_over_f_on_a_fine_grid(spec):
    check.check_predictions(spec)


def test_log_densities_integrate_all_entries_of_a_row_on_a_fine_grid(spec):
    check.check_log_densities(spec)


def test_a_rows_answers_do_not_depend_on_the_number_the_order_and_the_values_of_other_rows(spec):
    check.check_companions(spec)
