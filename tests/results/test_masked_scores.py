"""`compare` scores what the test data hold: no rows that a mask leaves out, outputs in any order."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import ppl_gp as pg

X, X_NEW = np.linspace(0.0, 3.0, 12), np.linspace(0.1, 2.9, 8)
SEEN = np.arange(8) % 2 == 0
FIXED = pg.Laplace(hyper=pg.Fixed())
FIGURES = ("log_density", "log_density_se", "error", "calibration")


def numbers(X, seen, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def classes(X, seen, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=seen):
        numpyro.sample("y", dist.Bernoulli(logits=3.0 * f), obs=y)


@pytest.mark.parametrize("model", [numbers, classes])
def test_fillers_are_not_scored(model):
    """The definition: the same as of the rows that count alone."""
    truth = np.sin(2.0 * X_NEW) + 0.1
    y, y_new, filler = np.sin(2.0 * X), truth, 99.0
    if model is classes:
        y, y_new, filler = (y > 0).astype(int), (truth > 0).astype(int), 1
    fit = pg.fit(model, FIXED, 0, X, np.ones(12, bool), y=y)
    filled = np.where(SEEN, y_new, filler)
    ask = lambda *data: pg.compare({"a": fit}, *data, num_importance_samples=100).table[0]  # noqa: E731
    found, want = ask(X_NEW, filled, SEEN), ask(X_NEW[SEEN], filled[SEEN], SEEN[SEEN])
    for k in FIGURES:
        np.testing.assert_allclose(found[k], want[k], rtol=1e-9, err_msg=k)
