"""Observations that are Gaussian about a combination of many functions: predictions are the dense
formula's, without draws, and what is not Gaussian is not taken for it.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import multivariate_normal

import ppl_gp as pg

RNG = np.random.default_rng(2)
Q = 4  # functions, outputs and rows alike
W, NOISE = RNG.normal(size=(Q, Q)), np.array([0.3, 0.4, 0.5, 0.6])
X, Y = np.sort(RNG.uniform(0.0, 4.0, Q)), RNG.normal(size=(Q, Q))
X_NEW, Y_NEW = np.array([0.3, 1.7, 3.1]), RNG.normal(size=(3, Q))


def outputs(X, y=None, link=lambda g: g, noise=NOISE):
    with numpyro.plate("latents", Q):
        g = numpyro.sample("g", pg.GP(pg.kernels.RBF(1.0, 1.2), X, jitter=0.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(link((W @ g).T), noise).to_event(1), obs=y)


def dense(X_new):
    """(mean, covariance) of y at new rows, rows outermost."""
    k = lambda a, b: np.exp(-0.5 * ((a[:, None] - b) / 1.2) ** 2)  # noqa: E731
    K = lambda a, b: np.kron(k(a, b), W @ W.T)  # noqa: E731
    data = K(X, X) + np.kron(np.eye(Q), np.diag(NOISE**2))
    cross = np.linalg.solve(data, K(X, X_new)).T
    noise = np.kron(np.eye(len(X_new)), np.diag(NOISE**2))
    return cross @ Y.ravel(), K(X_new, X_new) - cross @ K(X, X_new) + noise


@pytest.mark.slow
def test_gaussian_outputs_of_many_functions_are_exact():
    fit = pg.fit(outputs, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=Y)
    for rows in (slice(None), slice(1, 2)):
        mean, covariance = dense(X_NEW[rows])
        found = fit.predict(X_NEW[rows])
        assert found.mean_error is None
        np.testing.assert_allclose(found.mean.ravel(), mean, atol=1e-9)
        np.testing.assert_allclose(found.variance.ravel(), np.diag(covariance), rtol=1e-9)
        log_p, error = fit.log_density(X_NEW[rows], Y_NEW[rows], with_error=True)
        blocks = [slice(Q * n, Q * n + Q) for n in range(len(X_NEW[rows]))]
        each = [
            multivariate_normal(mean[b], covariance[b, b]).logpdf(y)
            for b, y in zip(blocks, Y_NEW[rows], strict=True)
        ]
        np.testing.assert_allclose(log_p, each, atol=1e-9)
        np.testing.assert_array_equal(error, 0.0)


@pytest.mark.slow
def test_a_curved_mean_is_averaged_over_draws():
    method = pg.Laplace(hyper=pg.Fixed({}))
    fit = pg.fit(outputs, method, 0, X, y=np.tanh(Y), link=jnp.tanh, throw=False)
    found, draws = fit.predict(X_NEW), fit.sample(1, X_NEW, 20_000).y
    assert np.all(found.mean_error > 0.0)
    error = np.hypot(found.mean_error, np.std(draws, 0) / np.sqrt(len(draws)))
    assert np.all(np.abs(found.mean - np.mean(draws, 0)) < 5.0 * error)
    log_p, error = fit.log_density(X_NEW, Y_NEW, with_error=True)
    assert np.all(error > 0.0) and np.all(np.isfinite(log_p))
