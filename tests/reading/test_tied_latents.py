"""Latents of the rows that know each other have none at other rows: a path is not drawn anew."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

import ppl_gp as pg

T = np.arange(10.0)
Y = 5.0 + np.cumsum(np.random.default_rng(0).normal(size=10))


def path(t, y=None):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))

    def step(before, _):
        x = numpyro.sample("x", dist.Normal(before, spread))
        return x, x

    _, x = scan(step, 5.0, t)
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.Normal(x, 0.3), obs=y)


def walk(t, y=None):
    x = numpyro.sample("x", dist.GaussianRandomWalk(1.0, num_steps=t.shape[0]))
    with numpyro.plate("data", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(0.2 * x)), obs=y)


def exchangeable(t, y=None):
    """Latents of the rows that stand alone, in a plate and as an event of independent entries."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    e = numpyro.sample("e", dist.Normal(0.0, spread).expand([t.shape[0]]).to_event(1))
    with numpyro.plate("data", t.shape[0]):
        x = numpyro.sample("x", dist.Normal(0.1 * t, spread))
        numpyro.sample("y", dist.Normal(x + e, 0.3), obs=y)


NUTS = pg.NUTS(20, 20, 1)


@pytest.mark.parametrize(("model", "y"), [(path, Y), (walk, np.rint(Y).astype(int))])
def test_a_path_is_not_drawn_anew(model, y):
    fit = pg.fit(model, NUTS, 0, T, y=y, throw=False)
    for ask in (lambda: fit.predict(T), lambda: fit.log_density(T, y)):
        with pytest.raises(pg.ModelError, match=r"\['x'\] have an entry for each row.*fit.hyper"):
            ask()
    assert fit.hyper["x"].shape == (20, 10)


@pytest.mark.slow
def test_latents_that_stand_alone_are_new_at_new_rows():
    fit = pg.fit(exchangeable, NUTS, 0, T, y=Y, throw=False)
    assert fit.predict(T[:3]).mean.shape == (3,)
