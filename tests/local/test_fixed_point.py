"""The loop behind EP, VI and the local bound, on maps whose fixed points are known."""

import jax.numpy as jnp
import numpy as np
import pytest

from ppl_gp.errors import Result
from ppl_gp.local.method import Evaluation, fixed_point

SIZE = 12
RNG = np.random.default_rng(0)
ROTATION = jnp.asarray(np.linalg.qr(RNG.normal(size=(SIZE, SIZE)))[0])
RATES = jnp.linspace(-0.6, 0.97, SIZE)
TARGET = jnp.asarray(RNG.normal(size=SIZE))


def _linear(rates, merit=lambda x: jnp.zeros(())):
    """g(x) = TARGET + A (x - TARGET) with the eigenvalues `rates`."""

    def evaluate(x):
        g = TARGET + ROTATION @ (rates * (ROTATION.T @ (x - TARGET)))
        return Evaluation(g, jnp.ones_like(x), jnp.max(jnp.abs(g - x)), merit(x), None)

    return evaluate


def _run(evaluate, start=None, **kwargs):
    x = jnp.zeros(SIZE) if start is None else start
    options = {"tol": 1e-10, "max_steps": 200, "damping": 1.0, **kwargs}
    return fixed_point(evaluate, x, evaluate(x), **options)


def test_finds_the_fixed_point_and_says_so():
    end = _run(_linear(RATES))
    assert Result.from_code(end.code) == "converged"
    np.testing.assert_allclose(end.x, TARGET, rtol=0, atol=1e-8)
    assert float(end.evaluation.residual) < 1e-10


def test_acceleration_beats_plain_iteration():
    # Plain iteration needs log(1e-10) / log(0.97), about 750 steps.
    assert int(_run(_linear(RATES)).steps) < 100


def test_a_start_at_the_fixed_point_takes_no_step():
    assert int(_run(_linear(RATES), TARGET).steps) == 0


def test_step_limit_is_reported_with_the_last_point():
    end = _run(_linear(RATES), max_steps=3)
    assert Result.from_code(end.code) == "max_steps" and int(end.steps) == 3
    assert np.linalg.norm(end.x - TARGET) < np.linalg.norm(TARGET)


def test_damping_still_reaches_the_fixed_point():
    end = _run(_linear(RATES), damping=0.5)
    assert Result.from_code(end.code) == "converged"
    np.testing.assert_allclose(end.x, TARGET, rtol=0, atol=1e-8)


def test_an_expanding_map_converges_by_smaller_steps():
    # Eigenvalues below -1 diverge undamped: halving the step makes them contract.
    end = _run(_linear(jnp.full(SIZE, -1.8)))
    assert Result.from_code(end.code) == "converged"
    np.testing.assert_allclose(end.x, TARGET, rtol=0, atol=1e-8)


def test_nan_everywhere_is_nonfinite_at_the_last_good_point():
    def evaluate(x):
        residual = jnp.where(jnp.all(x == 0.0), 1.0, jnp.nan)
        return Evaluation(x + 1.0, jnp.ones_like(x), residual, jnp.zeros(()), None)

    end = _run(evaluate)
    assert Result.from_code(end.code) == "nonfinite"
    np.testing.assert_array_equal(end.x, 0.0)


def test_nan_at_the_start_never_counts_as_converged():
    def evaluate(x):
        return Evaluation(x, jnp.ones_like(x), jnp.asarray(jnp.nan), jnp.zeros(()), None)

    assert Result.from_code(_run(evaluate).code) != "converged"


def test_the_merit_never_falls():
    merits = []

    def merit(x):
        return -jnp.sum((x - TARGET) ** 2)

    # Every prefix of the run ends at the point kept so far.
    for steps in (1, 2, 4, 8):
        merits.append(float(_run(_linear(RATES, merit), max_steps=steps).evaluation.merit))
    assert np.all(np.diff(merits[1:]) >= -1e-8)


@pytest.mark.parametrize("least", [0.02, 0.005, 0.001])
def test_where_a_residual_is_least_need_be_no_fixed_point(least):
    """From -0.5 the map leads through 0, where it moves by `least`, to its fixed point at 2."""

    def evaluate(x):
        move = 0.3 * (least / 0.6 + x**2) * (2.0 - x)
        residual = jnp.max(jnp.abs(move))
        return Evaluation(x + move, jnp.ones_like(x), residual, jnp.zeros(()), None)

    end = _run(evaluate, jnp.full(1, -0.5), damping=0.9)
    assert Result.from_code(end.code) == "converged"
    np.testing.assert_allclose(end.x, 2.0, rtol=0, atol=1e-8)
