"""EP converges, or says that it did not, on 300 random problems: every likelihood, n to 200, D to
20, sd of f to 30.
"""

from collections import Counter

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from stress_problems import NAMES, problem
from toy_models import one_gp

import ppl_gp as pg
from ppl_gp.errors import Result

PROBLEMS = 300


@eqx.filter_jit
def _solve(method, likelihood, X, y, hyper):
    factors = pg.read(one_gp, X, y=y, likelihood=likelihood, hyper=hyper)
    value, solution = pg.log_evidence(method, factors)
    return value, solution.code


def _outcome(method, seed):
    p = problem(seed)
    hyper = {k: jnp.asarray(v) for k, v in p.hyper.items()}
    value, code = _solve(method, p.likelihood, jnp.asarray(p.X), jnp.asarray(p.y), hyper)
    return p.likelihood, Result.from_code(code), float(value)


@pytest.mark.long
@pytest.mark.parametrize(
    "method, share", [(pg.EP(), 0.99), (pg.Laplace(), 0.99)], ids=["ep", "laplace"]
)
def test_random_problems(method, share):
    outcomes = [_outcome(method, seed) for seed in range(PROBLEMS)]
    failed = Counter((name, str(result)) for name, result, _ in outcomes if result != "converged")
    print(
        {name: sum(o[0] == name for o in outcomes) for name in NAMES},
        "not converged:",
        dict(failed),
    )
    assert all(np.isfinite(value) for _, result, value in outcomes if result == "converged")
    assert sum(failed.values()) <= (1 - share) * PROBLEMS, failed
