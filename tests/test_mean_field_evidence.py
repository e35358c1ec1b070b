"""Evidences in closed form: EM on that of a regression, and precision matrices of many columns."""

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


def regression(X, y=None):
    """PRML 10.3: the noise is known, the precision of the weights is not."""
    alpha = numpyro.sample("alpha", dist.Gamma(VAGUE, VAGUE))
    with numpyro.plate("columns", X.shape[1]):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0 / jnp.sqrt(alpha)))
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


def test_vague_hyperpriors_are_em_on_the_evidence():
    fit = pg.fit(regression, pg.MeanField(), 0, X, y=Y)
    alpha, m, S = by_em()
    assert log_evidence(alpha) > max(log_evidence(alpha * c) for c in (0.99, 1.01))
    np.testing.assert_allclose(fit.sites["alpha"].mean, alpha, rtol=1e-8)
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


@pytest.mark.parametrize("change", [lambda W: W + 0.01 * jnp.eye(3), lambda W: W @ W])
def test_functions_of_a_precision_are_refused(change):
    model = wishart(dist.Wishart, "precision_matrix", 3, change)
    with pytest.raises(pg.NotConjugateError, match="'W'"):
        pg.fit(model, pg.MeanField(), 0, np.ones((4, 3)))
