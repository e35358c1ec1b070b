"""A factor that is a sum over rows is part of no row's score, which is said."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import ppl_gp as pg

X, EVENT = np.linspace(0.0, 3.0, 12), np.arange(12) % 3 > 0
Y = np.random.default_rng(0).exponential(size=12)
NUTS = pg.NUTS(30, 30, num_chains=1)


def survival(X, event, y=None, summed=False):
    """Times that are known to be later than y, and times y."""
    rate = jnp.exp(numpyro.sample("level", dist.Normal(0.0, 1.0)) + 0.1 * X)
    if summed and y is not None:
        numpyro.factor("late", jnp.sum(jnp.where(event, 0.0, -rate * y)))
    with numpyro.plate("data", X.shape[0]):
        if not summed and y is not None:
            numpyro.factor("late", jnp.where(event, 0.0, -rate * y))
        with handlers.mask(mask=event):
            numpyro.sample("y", dist.Exponential(rate), obs=y)


@pytest.mark.parametrize("summed", [True, False])
def test_what_a_sum_leaves_out_of_a_row_is_said(summed):
    fit = pg.fit(survival, NUTS, 0, X, EVENT, y=Y, summed=summed, throw=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        densities = np.asarray(fit.log_density(X, Y, EVENT, summed=summed))
        fit.loo()
    assert np.all((np.abs(densities[~EVENT]) < 1e-12) == summed)
    told = [str(w.message) for w in seen if "leaves out the factors ['late']" in str(w.message)]
    assert [t.partition("(")[0] for t in told] == ["log_density", "loo"] * summed
    assert all("one term per row" in t for t in told)


def test_a_penalty_is_left_out_of_scores_without_a_word():
    """Its weight, a number that is passed, is no observation."""

    def ridge(X, weight, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        numpyro.factor("ridge", -0.5 * weight * jnp.sum(w**2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(w[0] + w[1] * X, 1.0), obs=y)

    fit = pg.fit(ridge, NUTS, 0, X, np.float64(0.1), y=Y, throw=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit.log_density(X, Y, np.float64(0.1))
    assert not [w for w in seen if "leaves out the factors" in str(w.message)]


def test_observations_under_another_name_may_enter_a_factor():
    """`log_density(X, t)` ended in a TypeError of an argument y."""

    def times(X, event, t=None):
        rate = jnp.exp(numpyro.sample("level", dist.Normal(0.0, 1.0)) + 0.1 * X)
        with numpyro.plate("data", X.shape[0]):
            if t is not None:
                numpyro.factor("late", jnp.where(event, 0.0, -rate * t))
            with handlers.mask(mask=event):
                numpyro.sample("t", dist.Exponential(rate), obs=t)

    fits = [
        pg.fit(m, NUTS, 0, X, EVENT, **{k: Y}, throw=False)
        for m, k in ((times, "t"), (survival, "y"))
    ]
    ours, theirs = (f.log_density(X, Y, EVENT) for f in fits)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
