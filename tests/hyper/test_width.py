"""Laplace near a saddle says that its q is wider than the prior, and only there."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_gp as pg

DEGREES, SCALE = 3.0, 0.3


def robust(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X, jitter=0.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(DEGREES, f, SCALE), obs=y)


def classes(X, y=None):
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def _fit(y, hyper):
    """(fit, whether it warned of its width) of one datum."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit = pg.fit(robust, pg.Laplace(hyper=hyper), 0, jnp.zeros(1), y=jnp.asarray([y]))
    return fit, any("times as wide" in str(w.message) for w in told)


@pytest.mark.slow
def test_the_figure_is_the_width_at_the_mode_and_is_told_where_it_doubles():
    seen = []
    for y in (0.5, 2.0, *np.linspace(3.8, 4.0, 21)):
        fit, told = _fit(y, pg.Fixed({}))
        r2 = (y - float(fit.predict(jnp.zeros(1)).f_mean[0])) ** 2
        total = DEGREES * SCALE**2
        curvature = (DEGREES + 1) * (total - r2) / (total + r2) ** 2  # of -log p(y | f)
        expected = (1.0 + curvature) ** -0.5
        np.testing.assert_allclose(fit.stats["widest"], expected, rtol=1e-5)
        assert told == (expected > 2.0)
        seen.append(expected)
    assert min(seen) < 1.0 and max(seen) > 2.0


def test_a_log_concave_likelihood_is_never_wider_than_its_prior():
    X, y = jnp.linspace(0.0, 1.0, 7), jnp.asarray([0, 1, 1, 0, 1, 1, 1])
    fit = pg.fit(classes, pg.Laplace(hyper=pg.Fixed({})), 0, X, y=y)
    assert fit.stats["widest"] <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("hyper", [pg.Sample(50, 40, 1), pg.Grid()], ids=["sample", "grid"])
def test_it_is_told_where_the_posterior_of_the_hyperparameters_goes_there(hyper):
    """A noise that is itself a function of few data."""
    from models.heteroscedastic import heteroscedastic

    rng = np.random.default_rng(3)
    x = np.linspace(-2.0, 2.0, 14)
    y = rng.normal(size=14) * np.exp(rng.normal(size=14))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit = pg.fit(heteroscedastic, pg.Laplace(hyper=hyper), 0, x, y=y, throw=False)
    wide = any("times as wide" in str(w.message) for w in told)
    assert wide == (fit.stats["widest"] > 2.0)


@pytest.mark.parametrize("told", [True, False])
def test_it_is_told_where_a_likelihood_is_a_step_function(told):
    """Whose rows change by log 9 at a step, where no slope says so: the posterior was the prior
    without a word. Rows that are masked have no slope either, and nothing to say.
    """
    x = np.linspace(0.0, 3.0, 20)

    def step(x, y=None):
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, 1.0), x))
        with numpyro.plate("data", len(x)), numpyro.handlers.mask(mask=told):
            numpyro.sample("y", dist.Bernoulli(probs=jnp.where(f > 0, 0.9, 0.1)), obs=y)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pg.fit(step, pg.Laplace(hyper=pg.Fixed({})), 0, x, y=(np.sin(2.0 * x) > 0).astype(int))
    texts = [str(w.message) for w in seen if "step function" in str(w.message)]
    assert len(texts) == told
    assert all(f"changes by {np.log(9.0):.2g} nats" in t and "Use EP()" in t for t in texts)
