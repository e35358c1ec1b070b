"""Draws of a model before it has seen observations."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import ppl_gp as pg

X = np.linspace(0.0, 3.0, 6)


def model(X, exposure=2.0, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.3))
    f = numpyro.sample("f", pg.GP(pg.kernels.RBF(variance, 1.0), X))
    rate = numpyro.deterministic("rate", exposure * jnp.exp(f))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def test_draws_of_a_prior():
    tree = pg.sample_prior(model, 0, X, num_samples=4000)
    prior, new = tree["prior"], tree["prior_predictive"]["y"]
    assert set(prior.data_vars) == {"variance", "f", "rate"} and new.dims == (
        "chain",
        "draw",
        "data",
    )
    f, variance = prior["f"].values[0], prior["variance"].values[0]
    np.testing.assert_allclose(np.mean(np.log(variance)), 0.0, atol=0.02)
    K = np.exp(-0.5 * (X[:, None] - X) ** 2)
    np.testing.assert_allclose(f.T @ f / len(f), np.mean(variance) * K, atol=0.12)
    np.testing.assert_allclose(prior["rate"].values[0], 2.0 * np.exp(f))
    z = (new.values[0] - prior["rate"].values[0]) / np.sqrt(prior["rate"].values[0])
    np.testing.assert_allclose([np.mean(z), np.var(z)], [0.0, 1.0], atol=0.06)
    again = pg.sample_prior(model, 0, X, num_samples=4000)
    np.testing.assert_array_equal(again["prior"]["f"].values, f[None])
    other = pg.sample_prior(model, 1, X, num_samples=2)
    assert not np.allclose(other["prior"]["f"].values, f[None, :2])
    seen = pg.sample_prior(model, 0, X, y=np.arange(6), num_samples=5)
    assert seen["prior_predictive"]["y"].shape == (1, 5, 6) and "y" not in seen["prior"]


def test_names_of_a_frame_and_bad_arguments():
    rows = [f"r{i}" for i in range(6)]
    tree = pg.sample_prior(model, 1, pd.Series(X, index=rows, name="time"), num_samples=2)
    assert list(tree["prior_predictive"]["y"].coords["data"].values) == rows
    with pytest.raises(pg.DataError, match=r"num_samples=0"):
        pg.sample_prior(model, 0, X, num_samples=0)

    def improper(X, y=None):
        a = numpyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    with pytest.raises(pg.ModelError, match="no draws"):
        pg.sample_prior(improper, 0, X)
