"""Gaussian effects that something beside the predictor keeps from being integrated are not silently
maximised.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import ppl_gp as pg

RNG = np.random.default_rng(0)
N, GROUPS = 24, 6
G = RNG.integers(0, GROUPS - 1, N)
Y = RNG.normal(size=N)


def group_effects(g, y=None, factor=False, scale=1.0, mask=None, prior_info=False, noise=False):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    s = jnp.exp(numpyro.sample("log_noise", dist.Normal(-1.0, 1.0))) if noise else 0.5
    if noise:
        numpyro.factor("penalty", -(s**2))
    if prior_info:
        numpyro.sample("info", dist.Normal(b, 0.1), obs=0.3)
    prior = dist.Normal(0.0, 1.0)
    with handlers.scale(scale=scale), numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", prior if mask is None else prior.mask(jnp.asarray(mask)))
    if factor:
        numpyro.factor("sum_to_zero", dist.Normal(0.0, 0.01).log_prob(jnp.sum(z)))
    with numpyro.plate("data", len(g)):
        numpyro.sample("y", dist.Normal(b + tau * z[g], s), obs=y)


WAYS = {
    "factor": ({"factor": True}, "'sum_to_zero'"),
    "scale": ({"scale": 2.0}, "handler stands around the prior of .'z'"),
    "mask": ({"mask": [True] * 3 + [False] * 3}, "handler stands around the prior of .'z'"),
}


@pytest.mark.one_case
@pytest.mark.parametrize("way", WAYS)
def test_effects_are_refused_under_map(way):
    options, why = WAYS[way]
    with pytest.raises(pg.ModelError, match=why):
        pg.fit(group_effects, pg.Laplace(), 0, G, y=Y, **options)
    assert not pg.check(group_effects, G, y=Y, **options).ok


@pytest.mark.slow
def test_who_holds_or_names_the_sites_may_go_on():
    z = {"z": np.zeros(GROUPS), "tau": 1.0}
    held = pg.fit(group_effects, pg.Laplace(hyper=pg.Fixed(z)), 0, G, y=Y, factor=True)
    named = pg.fit(group_effects, pg.Laplace(integrate=("b",)), 0, G, y=Y, factor=True)
    assert held.result == "converged" and set(named.sites) == {"b"}


@pytest.mark.slow
def test_one_value_is_told():
    with pytest.warns(UserWarning, match=r"maximises \['b'\].*'info'"):
        fit = pg.fit(group_effects, pg.Laplace(), 0, G, y=Y, prior_info=True)
    assert set(fit.sites) == {"z"} and "b" in fit.hyper


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Laplace")
def test_hyperparameters_with_normal_priors_and_penalties_are_what_they_are():
    fit = pg.fit(group_effects, pg.Laplace(), 0, G, y=Y, noise=True)
    assert set(fit.sites) == {"b", "z"} and {"log_noise", "tau"} <= set(fit.hyper)
