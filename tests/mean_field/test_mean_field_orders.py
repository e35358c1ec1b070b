"""The order of a polynomial by mean field's bound, against exact evidences: a sum over the two
precisions.
"""

import numpy as np
import pytest
from scipy.special import logsumexp

import ppl_gp as pg
from models.linear_regression import linear_regression

ORDERS = range(7)
PLACES = np.linspace(-2.0, 2.0, 10)


def log_evidence(X, y):
    """log p(y): over log alpha and log tau, each Gamma(1, 1); given both y is Gaussian."""
    u, v = np.linspace(-16.0, 6.0, 221), np.linspace(-12.0, 8.0, 201)
    values, vectors = np.linalg.eigh(X @ X.T)
    variance = np.maximum(values, 0) * np.exp(-u)[:, None, None] + np.exp(-v)[:, None]
    log_y = -0.5 * np.sum(np.log(2 * np.pi * variance) + (vectors.T @ y) ** 2 / variance, -1)
    log_prior = (u - np.exp(u))[:, None] + v - np.exp(v)
    return logsumexp(log_y + log_prior) + np.log((u[1] - u[0]) * (v[1] - v[0]))


@pytest.mark.slow
def test_the_order_of_a_cubic_is_that_of_the_evidence():
    """The cubic stands 4 nats above other orders, and the gap of the bound grows by half a nat."""
    y = PLACES**3 - 2.0 * PLACES + 0.3 * np.random.default_rng(4).normal(size=10)
    powers = [PLACES[:, None] ** np.arange(order + 1) for order in ORDERS]
    exact = np.array([log_evidence(X, y) for X in powers])
    fits = {
        str(i): pg.fit(linear_regression, pg.MeanField(), 0, X, y=y) for i, X in enumerate(powers)
    }
    bound = np.array([fit.log_evidence for fit in fits.values()])
    assert all(np.all(np.diff(fit.stats["bounds"]) > -1e-9) for fit in fits.values())
    gap = exact - bound
    assert np.all(gap > 0.0) and np.all(gap < 0.6)
    assert bound.argmax() == exact.argmax() == 3
    assert pg.compare_models(fits).best == "3"
