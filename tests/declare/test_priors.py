"""Priors from the data: their tails, their units, and what `check` says of a declared prior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

import ppl_gp as pg
from ppl_gp.priors import distances

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 2)) * [1.0, 30.0]


def share(prior, low, high):
    """Outside of both ends, of 200 000 draws."""
    drawn = np.asarray(prior.sample(random.key(0), (200_000,)))
    return (drawn < low).mean(0), (drawn > high).mean(0)


@pytest.mark.parametrize("tail", [0.01, 0.1])
def test_tails_are_at_the_nearest_and_the_largest_distance(tail):
    apart = np.linalg.norm(X[:, None] - X, axis=-1)
    nearest = np.median(np.min(apart + 1e9 * np.eye(len(X)), 1))
    np.testing.assert_allclose(distances(X), (nearest, apart.max()), rtol=1e-12)
    found = share(pg.priors.lengthscale(X, tail=tail), nearest, apart.max())
    np.testing.assert_allclose(found, tail, atol=4 * np.sqrt(tail / 2e5))


def test_a_length_scale_for_each_column():
    prior = pg.priors.lengthscale(X, ard=True)
    assert prior.event_shape == (2,)
    ends = np.transpose([distances(X[:, [d]]) for d in range(2)])
    np.testing.assert_allclose(share(prior, *ends), 0.01, atol=1e-3)


def test_variances():
    y = 5.0 + 3.0 * rng.normal(size=400)
    found = share(pg.priors.variance(y, tail=0.05), np.var(y) / 10, np.var(y) * 10)
    np.testing.assert_allclose(found, 0.05, atol=2e-3)


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_a_variance_in_units_whose_squares_leave_floating_point(unit):
    y = rng.normal(size=50)
    prior = pg.priors.variance(unit * y)
    np.testing.assert_allclose(prior.loc, np.log(np.var(y)) + 2 * np.log(unit), rtol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pg.priors.lengthscale(np.ones(5)),
        lambda: pg.priors.lengthscale(X * [1.0, 0.0], ard=True),
        lambda: pg.priors.lengthscale([1.0, np.nan]),
        lambda: pg.priors.lengthscale(X, tail=0.5),
        lambda: pg.priors.variance(np.ones(5)),
        lambda: pg.priors.variance(X, tail=0.0),
        lambda: pg.priors.lengthscale(np.ones((3, 2, 2)) * rng.normal(size=(3, 1, 1))),
        lambda: pg.priors.lengthscale(["a", "b"]),
        lambda: pg.priors.lengthscale(np.array([0.0, 1j])),
        lambda: pg.priors.lengthscale(np.array(["2024-01-01", "2024-02-01"], "datetime64[D]")),
        lambda: jax.jit(lambda x: pg.priors.lengthscale(x).mean)(jnp.ones(3)),
    ],
)
def test_what_has_no_prior_is_told(call):
    with pytest.raises(pg.DataError, match="priors"):
        call()


def test_two_rows_and_rows_at_equal_distances_have_one():
    for x in ([0.0, 1.0], np.eye(4)):
        prior = pg.priors.lengthscale(x)
        assert share(
            prior,
            *np.multiply(distances(np.asarray(x, float).reshape(len(x), -1)), [10**-0.5, 10**0.5]),
        ) == (
            pytest.approx(0.01, abs=2e-3),
            pytest.approx(0.01, abs=2e-3),
        )


def regression(x, y):
    prior, spread = pg.priors.lengthscale(x), pg.priors.variance(y)

    def model(X, y=None):
        ell, v = numpyro.sample("lengthscale", prior), numpyro.sample("variance", spread)
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(v, ell), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    return pg.fit(model, pg.Laplace(), 0, x, y=y)


@pytest.mark.slow
def test_units_of_the_inputs_change_no_prediction():
    x = np.linspace(0.0, 1.0, 40)
    y = np.sin(6.0 * x) + 0.1 * np.random.default_rng(1).normal(size=40)
    new = np.linspace(0.0, 1.3, 9)
    one, other = (regression(s * x, y).predict(s * new) for s in (1.0, 1000.0))
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-3)
    np.testing.assert_allclose(one.variance, other.variance, atol=1e-3)


def declared(prior):
    def model(X, y=None):
        ell = numpyro.sample("lengthscale", prior)
        f = numpyro.sample("f", pg.GP(pg.kernels.RBF(1.0, ell) + pg.kernels.Constant(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    return model


@pytest.mark.parametrize(
    "scale, ok, words", [(1.0, True, "to the nearest"), (1000.0, False, "pg.priors.lengthscale")]
)
def test_check_compares_a_prior_with_the_data(scale, ok, words):
    x = scale * np.linspace(0.0, 5.0, 30)
    found = pg.check(declared(dist.LogNormal(0.0, 0.5)), x, y=np.sin(x))
    (item,) = [i for i in found.items if i.name == "length scales"]
    assert item.ok == ok and words in item.message
    low, high = np.quantile(np.exp(0.5 * rng.normal(size=100_000)), [0.01, 0.99])
    told = [float(w) for w in item.message.split() if w.replace(".", "").isdigit()]
    assert abs(np.log(told[0] / low)) < 0.1 and abs(np.log(told[1] / high)) < 0.1


@pytest.mark.slow
def test_a_prior_of_numbers_that_has_no_moments():
    """NumPyro divides by zero for the mean and the variance of `InverseGamma(1.0, 1.0)`."""
    x = np.linspace(0.0, 5.0, 8)
    model = declared(dist.InverseGamma(1.0, 1.0))
    assert pg.check(model, x, y=np.sin(x)).items
    fixed = pg.Laplace(hyper=pg.Fixed({"lengthscale": 1.0}))
    assert np.isfinite(pg.fit(model, fixed, 0, x, y=np.sin(x)).log_evidence)


@pytest.mark.slow
def test_check_of_scales_for_each_column_and_of_fixed_ones():
    for ell in (jnp.array([1.0, 30.0]), 1.0):
        found = pg.check(declared(dist.Delta(ell).to_event(jnp.ndim(ell))), X, y=X[:, 0])
        (item,) = [i for i in found.items if i.name == "length scales"]
        assert "%" not in item.message or not item.ok
