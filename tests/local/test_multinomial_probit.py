"""The multinomial probit against its integral on a fine grid, the binary probit, draws of its
definition, and inside a model against the truth.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax import random
from scipy import stats

import ppl_gp as pg
from ppl_gp.errors import DataError
from ppl_gp.observations import BernoulliProbit, MultinomialProbit

GRID = np.linspace(-60.0, 200.0, 300_001)


def log_p(f, c):
    """log p(y = c | f) by the trapezoid rule in log space."""
    d = f[c] - np.delete(f, c)
    terms = stats.norm.logpdf(GRID) + stats.norm.logcdf(GRID[:, None] + d).sum(1)
    return terms.max() + np.log(np.exp(terms - terms.max()).sum() * (GRID[1] - GRID[0]))


@pytest.mark.one_case
@pytest.mark.parametrize("C", [2, 3, 6])
@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_log_probabilities_are_the_integral_far_into_the_tails(C, scale):
    f = scale * np.random.default_rng(C).normal(size=C)
    found = MultinomialProbit(f).log_prob(jnp.arange(C))
    np.testing.assert_allclose(found, [log_p(f, c) for c in range(C)], atol=1e-9)
    np.testing.assert_allclose(jnp.exp(found).sum(), 1.0, atol=1e-9)


@pytest.mark.slow
def test_two_classes_are_the_binary_probit_up_to_the_second_derivative():
    f = jnp.array([0.3, -4.0])

    def binary(f):
        return BernoulliProbit((f[1] - f[0]) / jnp.sqrt(2.0)).log_prob(1)

    def multinomial(f):
        return MultinomialProbit(f).log_prob(1)

    for derivative in (lambda g: g, jax.grad, jax.hessian):
        np.testing.assert_allclose(derivative(multinomial)(f), derivative(binary)(f), atol=1e-10)


def test_derivatives_are_those_of_differences():
    f, step = np.array([0.5, -3.0, 1.0, 2.0]), 1e-5
    slope = jax.grad(lambda f: MultinomialProbit(f).log_prob(1))(jnp.asarray(f))
    by_differences = [
        (log_p(f + step * e, 1) - log_p(f - step * e, 1)) / (2 * step) for e in np.eye(4)
    ]
    np.testing.assert_allclose(slope, by_differences, atol=1e-7)


@pytest.mark.slow
def test_draws_are_of_the_definition():
    d = MultinomialProbit(jnp.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    drawn = np.asarray(d.sample(random.key(0), (40_000,)))
    shares = np.stack([(drawn == c).mean(0) for c in range(3)], -1)
    np.testing.assert_allclose(shares, d.probs, atol=4 * 0.5 / np.sqrt(40_000))
    assert d.batch_shape == (2,) and drawn.shape == (40_000, 2)


@pytest.mark.parametrize("f", [1.0, np.zeros((4, 1))])
def test_one_class_is_refused(f):
    with pytest.raises(DataError, match="C >= 2"):
        MultinomialProbit(f)


N = 6
X = np.linspace(-1.0, 1.0, N)
Y = np.array([0, 0, 1, 1, 2, 2])
KERNEL = pg.kernels.RBF(2.0, 0.7)


def model(X, y=None):
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", pg.GP(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", MultinomialProbit(f.T), obs=y)


def truth(num=20_000):
    """(log p(y), its standard error) by draws from the prior."""
    L = np.linalg.cholesky(np.asarray(KERNEL(X, X)) + 2e-8 * np.eye(N))
    f = L @ np.random.default_rng(0).normal(size=(num, 3, N, 1))
    rows = MultinomialProbit(jnp.asarray(np.swapaxes(f[..., 0], 1, 2))).log_prob(Y)
    p = np.exp(np.asarray(rows).sum(1))
    return np.log(p.mean()), p.std() / p.mean() / np.sqrt(num)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, within",
    [
        pytest.param(pg.Laplace(), 0.3, id="Laplace"),
        pytest.param(pg.EP(), 0.03, id="EP", marks=pytest.mark.long),
        pytest.param(pg.VI(), 0.3, id="VI", marks=pytest.mark.long),
    ],
)
def test_evidence_of_three_classes_is_near_the_truth(method, within):
    fit = pg.fit(model, method, 0, X, y=Y)
    exact, error = truth()
    assert abs(fit.log_evidence - exact) < within + 3 * error
    if isinstance(method, pg.VI):
        assert fit.log_evidence < exact + 3 * error
    probs = np.asarray(fit.predict(X).probs)
    np.testing.assert_allclose(probs.sum(-1), 1.0, atol=1e-6)
    assert np.all(probs.argmax(-1) == Y)
