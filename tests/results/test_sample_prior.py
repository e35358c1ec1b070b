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


def outcomes(X, first=None, second=None, third=None, level=None):
    """A level that may be given, an output that the next one sees, and two that nothing sees."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0), obs=level)
    with numpyro.plate("data", X.shape[0]):
        u = numpyro.sample("u", dist.Normal(a * X, 0.5), obs=first)
        numpyro.sample("v", dist.Normal(2.0 * u, 0.5), obs=second)
        numpyro.sample("w", dist.Normal(-u, 0.5), obs=third)


@pytest.mark.parametrize("given", ((), (None, np.ones(6)), (None, None, np.ones(6))))
def test_outputs_that_are_left_out_are_drawn_with_the_model(given):
    """Each draw of v follows its own draw of u, and u its own a: nothing is held at one draw."""
    tree = pg.sample_prior(outcomes, 0, X, *given, num_samples=4000)
    assert set(tree["prior"].data_vars) == {"a", "u"}
    assert set(tree["prior_predictive"].data_vars) == {"v", "w"}
    a, u = (tree["prior"][k].values[0] for k in "au")
    v, w = (tree["prior_predictive"][k].values[0] for k in "vw")
    for part in (u - a[:, None] * X, v - 2.0 * u, w + u):
        np.testing.assert_allclose(np.std(part, 0), 0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(u, 0), np.sqrt(X**2 + 0.25), rtol=0.05)
    assert set(tree["constant_data"].data_vars) == {"X"}


BESIDE = ("a condition", "a factor", "a mask", "another name for it", "another output")


@pytest.mark.parametrize("beside", BESIDE)
def test_observations_left_out_are_no_latents_whatever_else_is_known(beside):
    def own(X, shares=None, counts=None, z=None):
        if shares is not None and counts is not None:
            raise ValueError("one of the two")
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        if beside == "a factor":
            numpyro.factor("penalty", -0.5 * b**2)
        if beside == "another output":
            numpyro.sample("z", dist.Normal(X, 0.5).to_event(1), obs=z)
        mask = X < 2.0 if beside == "a mask" else None
        with numpyro.plate("data", X.shape[0]):
            y = shares if counts is None else counts
            numpyro.sample("y", dist.Normal(b * X, 0.5), obs=y, obs_mask=mask)

    held = numpyro.handlers.condition(own, {"b": 2.0}) if beside == "a condition" else own
    given = {"z": X} if beside == "another output" else {}
    tree = pg.sample_prior(held, 0, X, **given, num_samples=2000)
    y = tree["prior_predictive"]["y"]
    assert y.dims == ("chain", "draw", "data") and "y" not in tree.get("prior", {})
    b, spread = (2.0, 0.5) if beside == "a condition" else (0.0, np.sqrt(X**2 + 0.25))
    np.testing.assert_allclose(np.std(y.values[0], 0), spread, rtol=0.08)
    np.testing.assert_allclose(np.mean(y.values[0], 0), b * X, atol=0.3)


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
