"""Precision matrices of many columns: conjugate, their evidence in closed form, and their functions
refused.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import multigammaln

import ppl_gp as pg

BETA, VAGUE = 4.0, 1e-13
RNG = np.random.default_rng(7)
X = RNG.normal(size=(40, 3))
Y = X @ [1.0, -0.5, 2.0] + RNG.normal(size=40) / np.sqrt(BETA)


def regression(X, y=None, inverted=False):
    """PRML 10.3: the noise is known, the precision of the weights, or its inverse, is not."""
    if inverted:
        scale = jnp.sqrt(numpyro.sample("variance", dist.InverseGamma(VAGUE, VAGUE)))
    else:
        scale = 1.0 / jnp.sqrt(numpyro.sample("alpha", dist.Gamma(VAGUE, VAGUE)))
    with numpyro.plate("columns", X.shape[1]):
        w = numpyro.sample("w", dist.Normal(0.0, scale))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, BETA**-0.5), obs=y)


def by_em():
    """(alpha, m, S) that maximises N(y; 0, 1 / beta + X X' / alpha) (PRML 9.63)."""
    alpha = 1.0
    for _ in range(1000):
        S = np.linalg.inv(alpha * np.eye(3) + BETA * X.T @ X)
        m = BETA * S @ X.T @ Y
        alpha = 3.0 / (m @ m + np.trace(S))
    return alpha, m, S


def log_evidence(alpha):
    C = np.eye(40) / BETA + X @ X.T / alpha
    return -0.5 * (np.linalg.slogdet(2.0 * np.pi * C)[1] + Y @ np.linalg.solve(C, Y))


def sparse_counts(X, y=None):
    rate = numpyro.sample("rate", dist.Gamma(VAGUE, VAGUE))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Gamma(0.05, rate), obs=y)


@pytest.mark.slow
def test_vague_observations_are_drawn():
    """They are what is asked for, and nothing is settled of them."""
    y = np.random.default_rng(0).gamma(0.05, 1.0, 400)
    fit = pg.fit(sparse_counts, pg.MeanField(), 0, np.ones((400, 1)), y=y)
    drawn = np.asarray(fit.sample(0, np.ones((5, 1)), 20_000).y)
    rate = float(fit.sites["rate"].mean)
    np.testing.assert_allclose(drawn.mean(0), 0.05 / rate, rtol=0.2)
    assert np.all(np.quantile(drawn, 0.4, 0) < 1e-4 / rate)


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("inverted", [False, True])
def test_vague_hyperpriors_are_em_on_the_evidence(inverted):
    """Draws of such priors are zero or infinite: the first run of the model has others. A gain of
    1e-11 nats is seen in alpha's eighth digit.
    """
    fit = pg.fit(regression, pg.MeanField(), 0, X, y=Y, inverted=inverted)
    alpha, m, S = by_em()
    assert log_evidence(alpha) > max(log_evidence(alpha * c) for c in (0.99, 1.01))
    q = fit.sites["variance" if inverted else "alpha"]
    np.testing.assert_allclose(q.concentration / q.rate, alpha, rtol=3e-8)
    np.testing.assert_allclose(fit.sites["w"].mean, m, rtol=1e-8)
    np.testing.assert_allclose(fit.sites["w"].covariance_matrix, S, rtol=1e-8, atol=1e-14)


def wishart(kind, how, D, change=lambda W: W):
    """Rows about zero whose precision, or covariance, is the site."""

    def model(x):
        W = numpyro.sample("W", kind(D + 2.0, scale_matrix=jnp.eye(D)))
        with numpyro.plate("rows", len(x)):
            matrix = {how: change(W)}
            numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(D), **matrix), obs=x)

    return model


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("D", [2, 8])
@pytest.mark.parametrize(
    "kind, how",
    [(dist.Wishart, "precision_matrix"), (dist.InverseWishart, "covariance_matrix")],
)
def test_many_columns_are_conjugate(kind, how, D):
    """Eight were refused, where the matrices of the proof had a condition exponential in D."""
    x, prior = np.random.default_rng(D).normal(size=(6, D)), D + 2.0
    fit = pg.fit(wishart(kind, how, D), pg.MeanField(), 0, x)
    after = prior + 6.0
    exact = multigammaln(0.5 * after, D) - multigammaln(0.5 * prior, D) - 3.0 * D * np.log(np.pi)
    exact -= 0.5 * after * np.linalg.slogdet(np.eye(D) + x.T @ x)[1]
    np.testing.assert_allclose(fit.log_evidence, exact, atol=1e-9)


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("change", [lambda W: W + 0.01 * jnp.eye(3), lambda W: W @ W])
def test_functions_of_a_precision_are_refused(change):
    model = wishart(dist.Wishart, "precision_matrix", 3, change)
    with pytest.raises(pg.NotConjugateError, match="'W'"):
        pg.fit(model, pg.MeanField(), 0, np.ones((4, 3)))
