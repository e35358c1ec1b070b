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


def wishart(kind, how, D, change=lambda W: W):
    """Rows about zero whose precision, or covariance, is the site."""

    def model(x):
        W = numpyro.sample("W", kind(D + 2.0, scale_matrix=jnp.eye(D)))
        with numpyro.plate("rows", len(x)):
            matrix = {how: change(W)}
            numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(D), **matrix), obs=x)

    return model


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


@pytest.mark.one_case
@pytest.mark.parametrize("change", [lambda W: W + 0.01 * jnp.eye(3), lambda W: W @ W])
def test_functions_of_a_precision_are_refused(change):
    model = wishart(dist.Wishart, "precision_matrix", 3, change)
    with pytest.raises(pg.NotConjugateError, match="'W'"):
        pg.fit(model, pg.MeanField(), 0, np.ones((4, 3)))
