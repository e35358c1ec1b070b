"""`compare` scores what test data hold: no rows that a mask leaves out, outputs in any order."""

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


def outputs(X, seen, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("output", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(jnp.stack([f, -f]), 0.3), obs=y)


def test_outputs_before_rows():
    """Against the definitions, by hand from the prediction, of entries that count."""
    fit = pg.fit(outputs, FIXED, 0, X, np.ones((2, 12), bool), y=np.stack([np.sin(X), np.cos(X)]))
    seen = np.stack([SEEN, np.arange(8) % 4 == 0])
    y_new = np.where(seen, np.stack([np.sin(X_NEW), np.cos(X_NEW)]), 99.0)
    found = pg.compare({"a": fit}, X_NEW, y_new, seen, num_importance_samples=100).table[0]
    mean = np.asarray(fit.predict(X_NEW, seen).mean)
    want = np.sqrt(np.mean((mean - y_new)[seen] ** 2))
    np.testing.assert_allclose(found["error"], want, rtol=1e-9)
    density = np.asarray(fit.log_density(X_NEW, y_new, seen))[SEEN]
    np.testing.assert_allclose(found["log_density"], density.mean(), rtol=1e-9)
    with pytest.raises(pg.DataError, match="one observation per row"):
        pg.compare({"a": fit}, X_NEW, y_new[:, :-1], seen)
