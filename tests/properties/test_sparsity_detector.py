"""The walk's verdict on rows beside an independent detector of sparsity for jaxprs, asdex (in
`make test-slow`, where it is installed), on generated models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated_problem import Problem
from model_generator import random_specs

import ppl_gp as pg

asdex = pytest.importorskip("asdex")
pytestmark = pytest.mark.slow


def log_lik_of(problem, change=lambda f: f):
    """(f -> log p(y_n | f_n), (N,), N) of the model's own rows."""
    rows = np.arange(problem.spec.num)
    args, row_wise = problem.arguments(rows)
    more, kwargs = problem.remembered()
    y, observed = problem.observations(rows)
    factors = pg.read(
        problem.model, *args, *more, y=y, hyper=problem.hyper, **row_wise, **kwargs, **observed
    )
    return lambda f: factors.log_lik(change(f)), factors.log_lik.num


def pattern(function, num: int) -> np.ndarray:
    return np.asarray(asdex.jacobian_sparsity(function, jnp.zeros(num)).todense()) != 0


@pytest.mark.parametrize("spec", random_specs(200, seed=1), ids=str)
def test_a_datum_that_is_read_alone_depends_on_its_own_row(spec):
    """Where the detector knows no better than "perhaps" (a gather under `vmap`), by derivatives."""
    function, num = log_lik_of(Problem(spec))
    others = ~np.eye(num, dtype=bool)
    if np.any(pattern(function, num) & others):
        points = np.random.default_rng(0).normal(size=(5, num))
        slopes = jax.vmap(jax.jacobian(function))(jnp.asarray(points))
        assert np.all(np.asarray(slopes)[:, others] == 0.0)


@pytest.mark.parametrize("change", [jnp.cumsum, lambda f: f[::-1], lambda f: f - jnp.mean(f)])
def test_the_detector_sees_rows_that_are_coupled(change):
    """Its verdict is no constant."""
    function, num = log_lik_of(Problem(random_specs(1, seed=1)[0]), change)
    assert np.any(pattern(jax.jit(function), num) & ~np.eye(num, dtype=bool))
